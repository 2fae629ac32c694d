"""Sums over steps of estimates that come from independent batches, so that their variances add up.

The variance Σ v of the sum has the degrees of freedom of (Σ v)² / Σ v² batches with equal variances (Satterthwaite).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.statistics.estimate import Estimate, effective_samples
from rl_training.statistics.unavailable import Unavailable

SOME_STEPS = Unavailable("some_steps", "over {count} of {num_steps} steps: the others could not be measured")
COLUMNS = 4  # Σ value, Σ v, Σ v², number of steps


@dataclass(frozen=True)
class RunningSum:
    """The sums up to a step, by name. An estimate without a value or an error adds nothing.

    >>> sums = RunningSum().add({"a": Estimate(1.0, 3.0, 8), "b": Estimate(2.0, 1.0, 8)})
    >>> sums = sums.add({"b": Estimate.missing("too far"), "a": Estimate(-3.0, 4.0, 8)})
    >>> sums.table.tolist()
    [[-2.0, 25.0, 337.0, 2.0], [2.0, 1.0, 1.0, 1.0]]
    """

    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # (n,), checksums of the names
    table: Tensor = field(default_factory=lambda: torch.zeros(0, COLUMNS, dtype=torch.float64))  # (n, COLUMNS)

    def add(self, changes: Mapping[str, Estimate], num_steps: int = 1) -> RunningSum:
        """Return the sums including another batch's estimates. Names that it lacks keep their sums.

        Args:
            changes: The estimates by name, with their errors from this batch alone.
            num_steps: The number of steps that they are about.
        """
        rows = self._rows()
        for name, change in changes.items():
            row = rows.setdefault(_key(name), [0.0] * COLUMNS)
            variance = change.stderr**2
            if math.isfinite(change.value + variance):
                added = (change.value, variance, variance**2, num_steps)
                rows[_key(name)] = [old + new for old, new in zip(row, added, strict=True)]
        return RunningSum(torch.tensor([*rows]), torch.tensor([*rows.values()], dtype=torch.float64))

    def estimates(self, latest: Mapping[str, Estimate], num_steps: int) -> dict[str, Estimate]:
        """Return the sum of each name in `latest` as an estimate. A remark says if it lacks steps.

        Args:
            latest: The estimates that were added last. A sum without any step takes their reason. Their number of
                samples is taken for that of every step.
            num_steps: The number of steps since the first.

        Returns:
            Sums by name, in the unit of the estimates.
        """
        rows, estimates = self._rows(), {}
        for name, change in latest.items():
            total, variance, squares, count = rows[_key(name)]
            if not count:
                estimates[name] = Estimate.missing(change.reason)
                continue
            batches = variance**2 / squares if squares else 1.0
            remark = "" if count == num_steps else SOME_STEPS.formatted(count=int(count), num_steps=num_steps)
            num_samples = effective_samples(max(change.num_samples, 2), batches)
            estimates[name] = Estimate(total, math.sqrt(variance), num_samples, remark)
        return estimates

    def _rows(self) -> dict[int, list[float]]:
        return dict(zip(self.keys.tolist(), self.table.tolist(), strict=True))


def _key(name: str) -> int:
    return zlib.crc32(name.encode())
