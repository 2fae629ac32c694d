"""The processes that train together, through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """The processes that train together. Every method is collective: either all ranks call it or none does."""

    count: int  # number of ranks
    reduce: Callable[[Tensor], Tensor]  # sums a small tensor over ranks; collective
    number: int = 0  # this process's rank

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of every rank, (ranks, …). Collective."""
        table = values.new_zeros(self.count, *values.shape)
        table[self.number] = values
        return self.reduce(table)

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks. Collective."""
        return self.gather(values).amax(dim=0)

    def pad_to_equal_count(self, parts: list[Tensor], filler: Tensor) -> list[Tensor]:
        """Pad `parts` with `filler` so that every rank has the same number. Collective."""
        count = self.max(torch.tensor([float(len(parts))], dtype=torch.float64, device=filler.device))
        return parts + [filler] * (int(count) - len(parts))


def all_ranks() -> Ranks:
    """Return the ranks of torch.distributed's default group, or this process alone if it is not initialized."""
    if not dist.is_initialized():
        return Ranks(1, torch.clone)
    return Ranks(dist.get_world_size(), _sum_over_ranks, dist.get_rank())


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total
