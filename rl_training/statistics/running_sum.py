"""Sums over steps of estimates that come from independent batches, so that their variances add up.

The variance Σ v of the sum has the degrees of freedom of (Σ v)² / Σ v² batches with equal variances (Satterthwaite).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class RunningSum:
    """The sums up to a step, entry by entry, (n,) each. A step at which an entry is nan adds nothing to it."""

    total: Tensor = field(default_factory=_none)
    variance: Tensor = field(default_factory=_none)
    squared_variances: Tensor = field(default_factory=_none)  # Σ v²
    num_steps: Tensor = field(default_factory=_none)  # steps that are in each sum

    def add(self, values: Tensor, stderrs: Tensor, num_steps: int = 1) -> RunningSum:
        """Return the sums including another estimate. Another number of entries than before begins anew.

        Args:
            values: The estimates, (n,) fp64.
            stderrs: Their errors from this batch alone, (n,) fp64.
            num_steps: The number of steps that they are about.

        >>> total = RunningSum().add(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]))
        >>> total = total.add(torch.tensor([-3.0, torch.nan]), torch.tensor([4.0, torch.nan]))
        >>> total.total.tolist(), total.stderr.tolist(), total.num_steps.tolist()
        ([-2.0, 2.0], [5.0, 1.0], [2.0, 1.0])
        """
        zeros = torch.zeros_like(values)
        sums = (self.total, self.variance, self.squared_variances, self.num_steps)
        last = sums if len(self.total) == len(values) else (zeros, zeros, zeros, zeros)
        variances = stderrs.square()
        added = (values, variances, variances.square(), torch.full_like(values, num_steps))
        is_known = values.isfinite() & stderrs.isfinite()
        return RunningSum(*(old + new.where(is_known, 0.0) for old, new in zip(last, added, strict=True)))

    @property
    def stderr(self) -> Tensor:
        """Standard errors of the sums, (n,)."""
        return self.variance.sqrt()

    @property
    def batches(self) -> Tensor:
        """Effective numbers of batches behind the errors, (n,)."""
        return (self.variance.square() / self.squared_variances).nan_to_num(1.0)
