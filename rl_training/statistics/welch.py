"""Means of independent values and differences of independent estimates, with their errors.

mean         se = sd/√n, n − 1 degrees of freedom
difference   se² = se₁² + se₂², with ν = se⁴ / (se₁⁴/ν₁ + se₂⁴/ν₂) degrees of freedom, rounded down (Welch 1947);
             a sum of any number of values likewise (Satterthwaite 1946)

If one of two estimates has an asymmetric interval (l, u) about its value x, like a share near 1, the difference has the
interval

    x₁ − x₂ − √((x₁ − l₁)² + (u₂ − x₂)²)   to   x₁ − x₂ + √((u₁ − x₁)² + (x₂ − l₂)²)

(Newcombe 1998 for shares; Zou and Donner 2008 for others).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable

NO_VALUES = Unavailable("no_values", "there is no finite value")
ONE_VALUE = Unavailable("one_value", "one value has no error")


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its standard error, which a single value does not have."""
    if not values:
        return Estimate.missing(NO_VALUES)
    count = len(values)
    # Rounding could move the mean of equal values off them, which would give them an error.
    mean = min(max(math.fsum(values) / count, min(values)), max(values))
    if count == 1:
        return Estimate(mean, num_samples=1, reason=ONE_VALUE)
    squares = math.fsum((value - mean) * (value - mean) for value in values)  # nan if a value is infinite
    return Estimate(mean, math.sqrt(squares / (count - 1) / count), count)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return a − b of independent estimates. It has no error if one of them has none."""
    value = a.value - b.value
    if a.interval or b.interval:
        low_a, high_a = a.bounds()
        low_b, high_b = b.bounds()
        ends = (
            value - math.hypot(a.value - low_a, high_b - b.value),
            value + math.hypot(high_a - a.value, b.value - low_b),
        )
        return Estimate(value, reason="its interval is not symmetric", interval=ends)
    variances = [(e.stderr * e.stderr, e.num_samples - 1) for e in (a, b)]
    total = sum(variance for variance, _ in variances)
    if not math.isfinite(total) or any(variance > 0 and degrees < 1 for variance, degrees in variances):
        return Estimate(value, reason=a.reason or b.reason or "one of them has no error")
    if total == 0:
        return Estimate(value, 0.0, min(a.num_samples, b.num_samples))
    num_samples = samples_of_sum([variance for variance, _ in variances], [a.num_samples, b.num_samples])
    return Estimate(value, math.sqrt(total), num_samples)


def samples_of_sum(variances: Iterable[float], num_samples: Iterable[int]) -> int:
    """Return the degrees of freedom plus 1 of the error of a sum of independent values, rounded down (Satterthwaite).

    Args:
        variances: Of the values. Their sum is finite and above 0.
        num_samples: Independent units behind each variance: at least two where it is not 0.
    """
    terms = [(variance, number - 1) for variance, number in zip(variances, num_samples, strict=True) if variance]
    total = sum(variance for variance, _ in terms)
    freedom = 1 / sum((variance / total) ** 2 / degrees for variance, degrees in terms)
    return math.floor(freedom + 1e-9) + 1  # 1e-9: a number that is whole may be rounded below it


def is_significant(estimate: Estimate) -> bool:
    """Return whether the 95 % interval excludes 0; False if there is no error."""
    low, high = estimate.bounds()
    return low > 0 or high < 0
