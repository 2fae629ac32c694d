"""What averages over steps say of the noise scale, as estimates: values, errors, ends of intervals, reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_training.mathematics.adamw import WARM_STEPS
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.noise_scale import Averages, noise_scale_interval, signal_to_noise_interval

BOUNDS = ("", "_low", "_high")  # a value and the ends of its 95 % interval
NOT_WARM = f"no step of AdamW with {WARM_STEPS} steps behind it: its preconditioner is no metric before"
LOST = "the averaged estimate of |G|² is not above 0: the gradient is lost in its noise"
NO_NOISE = "tr Σ and |G|² are both 0: no gradient at all"
NO_UPPER_END = "no error bar: |G|² may be 0, so that its interval, …_low to …_high, has no upper end"
A_BOUND = "no error bar: the end of a 95 % interval"


def averaged(averages: Averages, value: float, stderr: float, why_none: str = NOT_WARM) -> Estimate:
    """Returns an average over steps, whose error is known once there are enough of them."""
    if averages.steps == 0:
        return Estimate.missing(why_none)
    if math.isnan(value):
        return Estimate.missing(NO_NOISE)
    num_samples = int(averages.degrees) + 1
    if averages.steps < MIN_FOLDS_FOR_STDERR:
        return Estimate(value, math.nan, num_samples, f"no error bar: it needs {MIN_FOLDS_FOR_STDERR} steps")
    return Estimate(value, stderr, num_samples)


def means(averages: Averages, why_none: str = NOT_WARM) -> list[Estimate]:
    """Returns tr Σ and |G|²."""
    stderrs = averages.covariance.diagonal().sqrt().tolist()
    return [averaged(averages, *pair, why_none) for pair in zip(averages.means.tolist(), stderrs, strict=True)]


def signal_to_noise(averages: Averages, why_none: str = NOT_WARM) -> Estimate:
    """Returns |G|² / tr Σ."""
    return averaged(averages, averages.signal_to_noise, averages.signal_to_noise_stderr, why_none)


def bound(averages: Averages, end: float, why_none: str = NOT_WARM) -> Estimate:
    """Returns an end of an interval, which may be infinite; nan while there are too few steps for an error."""
    known = averaged(averages, averages.signal_to_noise, 0.0, why_none)
    if math.isnan(known.stderr):
        return Estimate.missing(known.reason)
    return Estimate(end, num_samples=known.num_samples, reason=A_BOUND)


def noise_scale(averages: Averages, why_none: str = NOT_WARM) -> list[Estimate]:
    """Returns tr Σ / |G|² in prompts, and the ends of its interval; an error bar only where that has an upper end."""
    ends = noise_scale_interval(signal_to_noise_interval(averages))
    bounds = [bound(averages, end, why_none) for end in ends]
    ratio = averages.signal_to_noise
    scale = signal_to_noise(averages, why_none)
    if ratio <= 0:
        scale = Estimate.missing(LOST)
    elif not math.isnan(ratio):
        error, reason = (scale.stderr / ratio**2, scale.reason) if math.isfinite(ends[1]) else (math.nan, NO_UPPER_END)
        scale = Estimate(1.0 / ratio, error, scale.num_samples, scale.reason or reason)
    return [scale, *bounds]


def with_bounds(name: str, estimates: Sequence[Estimate]) -> dict[str, Estimate]:
    """Returns a value and the ends of its interval, by their names."""
    return {f"{name}{end}": estimate for end, estimate in zip(BOUNDS, estimates, strict=True)}


def times(estimate: Estimate, factor: float) -> Estimate:
    """Returns the estimate of so many times the quantity."""
    return Estimate(estimate.value * factor, estimate.stderr * factor, estimate.num_samples, estimate.reason)
