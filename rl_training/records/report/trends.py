"""Trends of logged numbers, with the intervals without which nothing is called one."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.special import betaincinv

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import mean_of

MIN_STEPS = 8  # of a line: with fewer its error is too noisy to be quoted
MOST_CORRELATED = 0.8  # of neighbouring residuals: beyond it a line's error would be a guess
RECENT = 10  # logged steps, over which shares and means are taken


def line_through(values: pd.Series[float]) -> Estimate:
    """Return the slope, per step, of the least-squares line through values by step; nan of fewer than MIN_STEPS.

    The error is that of the residuals, times √((1 + ρ)/(1 − ρ)) for the correlation ρ of neighbouring ones where it is
    positive: a curve that is no line, and values that remember those before, widen the interval.
    """
    count = len(values)
    if count < MIN_STEPS:
        return Estimate.missing(f"a line needs {MIN_STEPS} logged steps, there are {count}")
    steps, levels = values.index.to_numpy(dtype=float), values.to_numpy(dtype=float)
    with np.errstate(over="ignore"):
        x, y = steps - steps.mean(), levels - levels.mean()
    size = float(np.abs(y).max())  # the line is through y / size: squares of what is recorded may have no end
    if not math.isfinite(size):
        return Estimate.missing("the values are too large for a line")
    if size <= 1e-12 * float(np.abs(levels).max()):
        return Estimate(0.0, 0.0, count - 1)
    y = y / size
    squares = float(x @ x)
    slope = float(x @ y) / squares
    rest = y - slope * x
    around = float(rest @ rest)
    rho = min(max(float(rest[:-1] @ rest[1:]) / around, 0.0), MOST_CORRELATED) if around > 0 else 0.0
    stderr = math.sqrt(around / (count - 2) / squares * (1 + rho) / (1 - rho))
    return Estimate(size * slope, size * stderr, count - 1)  # a line has a degree of freedom less than a mean


def times(estimate: Estimate, factor: float) -> Estimate:
    """Return an estimate in another unit, or over so many steps."""
    ends = estimate.interval and (factor * estimate.interval[0], factor * estimate.interval[1])
    value, stderr = factor * estimate.value, abs(factor) * estimate.stderr
    return Estimate(value, stderr, estimate.num_samples, estimate.reason, interval=ends)


def mean_of_recent(values: pd.Series[float], steps: int = RECENT) -> Estimate:
    """Return the mean of the last values, with their scatter as its error."""
    return mean_of([float(value) for value in values.tail(steps)])


def share_of(part: float, whole: float) -> Estimate:
    """Return a share with the interval of Clopper and Pearson (1934), which holds however few there are.

    >>> low, high = share_of(0, 100).bounds()
    >>> low, round(high, 4)
    (0.0, 0.0362)
    """
    if not whole > 0:
        return Estimate.missing("there are none")
    part = min(max(part, 0.0), whole)
    low = float(betaincinv(part, whole - part + 1, 0.025)) if part > 0 else 0.0
    high = float(betaincinv(part + 1, whole - part, 0.975)) if part < whole else 1.0
    return Estimate(part / whole, num_samples=int(whole), reason="its interval is not symmetric", interval=(low, high))


def first_of_trailing(holds: pd.Series[bool]) -> int | None:
    """Return the step from which on something holds until the last one; None where it does not hold there."""
    fails = np.flatnonzero(~holds.to_numpy(dtype=bool))
    start = int(fails[-1]) + 1 if len(fails) else 0
    return None if start >= len(holds) else int(holds.index[start])
