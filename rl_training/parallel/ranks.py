"""The processes that train together, by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """The processes that train together. `reduce(tensor)` sums a small tensor over them: call it on all or on none."""

    count: int
    reduce: Callable[[Tensor], Tensor]
    number: int = 0  # of this one

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of each process, (processes, …). A collective."""
        table = values.new_zeros(self.count, *values.shape)
        table[self.number] = values
        return self.reduce(table)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest of each number over the processes. A collective."""
        return self.gather(values).amax(dim=0)

    def pad_to_equal_count(self, parts: list[Tensor], filler: Tensor) -> list[Tensor]:
        """Return the parts, and this one as often as another process has more. A collective."""
        count = self.max(torch.tensor([float(len(parts))], dtype=torch.float64, device=filler.device))
        return parts + [filler] * (int(count) - len(parts))


def all_ranks() -> Ranks:
    """Return all processes of the default group: this one alone where torch.distributed was not started."""
    if not dist.is_initialized():
        return Ranks(1, torch.clone)
    return Ranks(dist.get_world_size(), _sum_over_ranks, dist.get_rank())


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total
