"""Trends of logged numbers. None is claimed without an interval. Thresholds were chosen by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy.special import betaincinv

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.line import slope_with_error
from rl_training.statistics.welch import mean_of

MIN_STEPS = 8  # for a line: with fewer steps its error is too noisy to quote
RECENT = 10  # logged steps that shares and means cover
MAX_WINDOW = 5  # logged steps averaged at either end of a run, because a single batch is too noisy
MIN_POINTS = 3  # for a correlation, or a line with a meaningful slope


def line_through(values: pd.Series[float]) -> Estimate:
    """Return the slope per step of the least-squares line through values by step; nan for fewer than MIN_STEPS.

    Its error is that of statistics/line.py, which is wider if the curve is no line or values depend on earlier ones.
    """
    count = len(values)
    if count < MIN_STEPS:
        return Estimate.missing(f"a line needs {MIN_STEPS} logged steps, there are {count}")
    steps = values.index.to_numpy(dtype=float)
    levels = values.to_numpy(dtype=float)
    with np.errstate(over="ignore"):
        deviations = levels - levels.mean()
    size = float(np.abs(deviations).max())
    if not math.isfinite(size):
        return Estimate.missing("the values are too large for a line")
    if size <= 1e-12 * float(np.abs(levels).max()):
        return Estimate(0.0, 0.0, count - 1)
    return times(slope_with_error(steps, deviations / size), size)  # squares of recorded values may overflow


def times(estimate: Estimate, factor: float) -> Estimate:
    """Return an estimate times a factor, for another unit or for several steps."""
    ends = estimate.interval and (factor * estimate.interval[0], factor * estimate.interval[1])
    stderr = abs(factor) * estimate.stderr
    return Estimate(factor * estimate.value, stderr, estimate.num_samples, estimate.reason, interval=ends)


def mean_of_recent(values: pd.Series[float], steps: int = RECENT) -> Estimate:
    """Return the mean of the last values; its error is their scatter."""
    return mean_of([float(value) for value in values.tail(steps)])


def share_of(part: float, whole: float) -> Estimate:
    """Return a share with the interval of Clopper and Pearson (1934), which is valid for any sample size.

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
    """Return the first step of the final stretch in which `holds` is always true; None if it is false at the end."""
    place = place_of_trailing(holds.to_numpy(dtype=bool))
    return None if place is None else int(holds.index[place])


def place_of_trailing(holds: np.ndarray) -> int | None:
    """Return the first place of the final stretch in which `holds` is always true; None if it is false at the end."""
    fails = np.flatnonzero(~holds)
    start = int(fails[-1]) + 1 if len(fails) else 0
    return start if start < len(holds) else None


def scaled(values: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the values times the factor that fits them to `truth` by least squares."""
    return values * (truth @ values) / (values @ values)


def constants(by_name: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the values that are all the same, which correlate with nothing: r would be 0 / 0."""
    return [name for name, values in by_name.items() if not np.ptp(values) > 0]


def running_window(num_values: int) -> int:
    """Return the window of a running mean, an odd number of values: 5, or about a twentieth of a long run."""
    return max(5, num_values // 20 // 2 * 2 + 1)
