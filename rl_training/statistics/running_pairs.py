"""Two estimates with their joint covariance: the interval of their ratio, and their means over steps.

Batches of different steps are independent. So the mean Σ w x / Σ w, with w = decay^age, has the covariance
Σ w² C / (Σ w)². Its degrees of freedom are Satterthwaite's for the first estimate, (Σ w² V)² / Σ ((w² V)² / ν).
The second estimate may be missing at some steps. Its mean, and both means' covariance, are then over the others.

A step that failed and is taken again counts once, with its last pair. Numbering that restarts begins a new mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from scipy.special import stdtrit
from torch import Tensor

from rl_training.statistics.estimate import NOT_FINITE_GRADIENT, Estimate


def fieller_interval(means: Tensor, covariance: Tensor, degrees: float, coverage: float = 0.95) -> tuple[float, float]:
    """Return Fieller's interval of numerator / denominator.

    The interval contains each ρ that the data do not reject. With q, Student's quantile,

        (S − ρT)² ≤ q² (V_SS − 2ρ V_TS + ρ² V_TT).

    Unlike value ± q·stderr of the ratio, this assumes only that S and T are normal.

    Args:
        means: The denominator T and the numerator S, (2,).
        covariance: The covariance of T and S, (2, 2).
        degrees: The covariance's degrees of freedom, for Student's t.
        coverage: The interval's coverage.

    Returns:
        The ends of the interval; (−∞, ∞) if T may be 0.

    Example: T = 1 without error, S = 3 ± 1 and infinitely many degrees: 3 ± 1.96.

    Source: Fieller 1954, "Some problems in interval estimation".
    """
    quantile = float(stdtrit(degrees, 0.5 + 0.5 * coverage))
    denominator, numerator = means.tolist()
    (denominator_variance, cross_covariance), (_, numerator_variance) = (quantile**2 * covariance).tolist()
    square = denominator**2 - denominator_variance
    linear = denominator * numerator - cross_covariance
    constant = numerator**2 - numerator_variance
    if not square > 0:
        return -math.inf, math.inf
    half = math.sqrt(max(linear**2 - square * constant, 0.0))  # below 0 by rounding only: S/T is always inside
    return (linear - half) / square, (linear + half) / square


@dataclass(frozen=True)
class Pair:
    """Two estimates from the same units, with their joint covariance."""

    values: Tensor  # (2,)
    covariance: Tensor  # (2, 2)
    degrees: float  # degrees of freedom of the covariance

    def times(self, factor: float) -> Pair:
        """Return both estimates times a factor."""
        return Pair(factor * self.values, factor**2 * self.covariance, self.degrees)

    def estimate(self, number: int, remark: str = "") -> Estimate:
        """Return estimate 0 or 1 with its error; missing if it is not finite."""
        if not bool(self.values[number].isfinite()):
            return Estimate.missing(remark or NOT_FINITE_GRADIENT)
        variance = float(self.covariance[number, number])
        return Estimate(float(self.values[number]), math.sqrt(max(variance, 0.0)), int(self.degrees) + 1, remark)

    def estimates(self, second_reason: str | None, remark: str = "") -> tuple[Estimate, Estimate]:
        """Return both estimates with their errors. The second is missing if a reason, `second_reason`, is given."""
        second = Estimate.missing(second_reason) if second_reason else self.estimate(1, remark)
        return self.estimate(0, remark), second

    def minus_ratio(self, reason: str) -> Estimate:
        """Return −second/first with Fieller's interval; missing, for `reason`, if the first may be 0.

        Example: first −2 without error, second 6 ± 1: 3 ± 0.5.
        """
        if not bool(self.values.isfinite().all()):
            return Estimate.missing(NOT_FINITE_GRADIENT)
        signs = self.values.new_tensor([1.0, -1.0])
        ends = fieller_interval(signs * self.values, signs.unsqueeze(1) * self.covariance * signs, self.degrees)
        if not math.isfinite(ends[0]):
            return Estimate.missing(reason)
        first, second = self.values.tolist()
        ratio = -second / first
        along = self.values.new_tensor([ratio, 1.0])  # ∂ratio = −(∂second + ratio ∂first) / first
        stderr = math.sqrt(max(float(along @ self.covariance @ along), 0.0)) / abs(first)
        return Estimate(ratio, stderr, int(self.degrees) + 1, interval=ends)


# The sums of a running pair: the weight of each estimate, both estimates, their variances and covariance, and the
# first's variance squared over its degrees of freedom.
POWERS = (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0)  # with which each of them decays
OF_SECOND = [1, 3, 5, 6]  # those to which a missing second estimate adds nothing


def _no_sums() -> Tensor:
    return torch.zeros(len(POWERS), dtype=torch.float64)


@dataclass(frozen=True)
class RunningPair:
    """The average of pairs over steps."""

    sums: Tensor = field(default_factory=_no_sums)  # as POWERS lists them
    sums_before: Tensor = field(default_factory=_no_sums)  # the same without the last step, should it be taken again
    num_steps: int = 0  # the number of steps in the sums
    last_step: int = 0  # the last of these steps

    def add(self, pair: Pair, step: int, decay: float) -> RunningPair:
        """Return the average with another step's pair. What is not finite is skipped: it would spoil the sums.

        Without the first estimate the whole pair is skipped, without the second only that.

        Args:
            decay: The weight of an optimizer step relative to the next one, measured or not.
        """
        has_first, has_second = pair.values.isfinite().tolist()
        if not has_first:
            return self
        cov = pair.covariance
        square = cov[0, 0].square() / pair.degrees
        weight = torch.ones_like(square)
        new = torch.stack([weight, weight, *pair.values, cov[0, 0], cov[0, 1], cov[1, 1], square])
        if not has_second:
            new[OF_SECOND] = 0.0
        before = torch.zeros_like(new)  # if numbering has restarted
        num_before = 0
        if step == self.last_step:  # it is taken again
            before = self.sums_before
            num_before = max(self.num_steps - 1, 0)
        elif step > self.last_step:
            powers = new.new_tensor(POWERS)
            before = (decay ** float(step - self.last_step)) ** powers * self.sums
            num_before = self.num_steps
        return RunningPair(before + new, before, num_before + 1, step)

    def mean(self) -> Pair:
        """Return the mean over the steps so far; nan if there are none."""
        weights = self.sums[:2]
        totals = self.sums[2:4]
        var_first, cross_covariance, var_second, squares = self.sums[4:]
        covariance = torch.stack([var_first, cross_covariance, cross_covariance, var_second]).view(2, 2)
        # A quotient just below 7 would count as 6.
        degrees = round(float(var_first.square() / squares), 6) if squares > 0 else 1.0
        return Pair(totals / weights, covariance / torch.outer(weights, weights), degrees)
