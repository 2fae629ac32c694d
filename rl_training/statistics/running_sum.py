"""Sums over steps of estimates that come from independent batches, so that their variances add up.

The variance Σ v of the sum has the degrees of freedom of (Σ v)² / Σ v² batches with equal variances (Satterthwaite).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.limit import Limit

SOME_STEPS = Limit("some_steps", "over {count} of {num_steps} steps: the others could not be measured")


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class RunningSum:
    """The sums up to a step, entry by entry, (n,) fp64 each. An estimate without a value or an error adds nothing.

    >>> sums = RunningSum().add([Estimate(1.0, 3.0, 8), Estimate(2.0, 1.0, 8)])
    >>> sums = sums.add([Estimate(-3.0, 4.0, 8), Estimate.missing("too far")])
    >>> sums.total.tolist(), sums.variance.tolist(), sums.num_steps.tolist()
    ([-2.0, 2.0], [25.0, 1.0], [2.0, 1.0])
    """

    total: Tensor = field(default_factory=_none)
    variance: Tensor = field(default_factory=_none)
    squared_variances: Tensor = field(default_factory=_none)  # Σ v²
    num_steps: Tensor = field(default_factory=_none)  # steps that are in each sum

    def add(self, changes: Sequence[Estimate], num_steps: int = 1) -> RunningSum:
        """Return the sums including another batch's estimates. Another number of entries than before begins anew.

        Args:
            changes: One for each entry, with the error from this batch alone.
            num_steps: The number of steps that they are about.
        """
        values, stderrs = torch.tensor([(change.value, change.stderr) for change in changes]).double().unbind(dim=1)
        zeros = torch.zeros_like(values)
        sums = (self.total, self.variance, self.squared_variances, self.num_steps)
        last = sums if len(self.total) == len(values) else (zeros, zeros, zeros, zeros)
        variances = stderrs.square()
        added = (values, variances, variances.square(), torch.full_like(values, num_steps))
        is_known = values.isfinite() & stderrs.isfinite()
        return RunningSum(*(old + new.where(is_known, 0.0) for old, new in zip(last, added, strict=True)))

    def estimates(self, latest: Sequence[Estimate], num_steps: int) -> list[Estimate]:
        """Return the sums as estimates, with a remark on those that lack some steps.

        Args:
            latest: The estimates that were added last: their reason, if a sum has no step yet, and their units.
            num_steps: The number of steps since the first.
        """
        batches = (self.variance.square() / self.squared_variances).nan_to_num(1.0)
        columns = (self.total, self.variance.sqrt(), batches, self.num_steps)
        estimates = []
        for change, (total, stderr, num_batches, count) in zip(latest, torch.stack(columns, 1).tolist(), strict=True):
            remark = "" if count == num_steps else SOME_STEPS.formatted(count=int(count), num_steps=num_steps)
            num_samples = 1 + int((max(change.num_samples, 2) - 1) * num_batches + 1e-9)
            known = Estimate(total, stderr, num_samples, remark)
            estimates.append(known if count else Estimate.missing(change.reason))
        return estimates
