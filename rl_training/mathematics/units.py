"""Sums over sequences that several processes hold, and the same sums by the independent units that they belong to.

A unit is what the jackknife leaves out, and independent of all others: a sequence where each answers a prompt of its
own, a prompt with all its responses, or a block of such that lies on one process. Over the network go sums of tables,
never the sequences themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def unchanged(tensor: Tensor) -> Tensor:
    """Returns what one process alone has: the sum over all of them."""
    return tensor


@dataclass(frozen=True)
class Units:
    """To which of `count` units each of this process's rows belongs. What is asked of it is asked by all processes."""

    number: Tensor  # (B,), 0 .. count - 1 over all processes; no unit lies on two
    count: int
    reduce: Callable[[Tensor], Tensor] = unchanged  # sums a tensor over the processes

    @classmethod
    def of_rows(cls, rows: Tensor) -> Units:
        """Returns one unit for each row of a table that this process alone holds."""
        return cls(torch.arange(len(rows), device=rows.device), len(rows))

    def in_blocks(self, size: int) -> Units:
        """Returns blocks of so many consecutive units, of which the last may have fewer."""
        return Units(self.number // size, -(-self.count // size), self.reduce)

    def total(self, values: Tensor) -> Tensor:
        """Returns the sum of (B, …) over all rows of all processes, (…)."""
        return self.reduce(values.sum(dim=0))

    def gather(self, values: Tensor) -> Tensor:
        """Returns the sums of (B, …) over the rows of each unit, (count, …), on every process."""
        table = values.new_zeros(self.count, *values.shape[1:])
        return self.reduce(table.index_add_(0, self.number, values))

    def largest(self, values: Tensor) -> Tensor:
        """Returns the maximum of (B, …) over all rows of all processes, (…)."""
        first = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        first[self.number.min()] = 1.0  # each process is known by its first unit
        first = self.reduce(first)
        table = values.new_zeros(int(first.sum()), *values.shape[1:])
        table[int(first[: int(self.number.min())].sum())] = values.amax(dim=0)
        return self.reduce(table).amax(dim=0)

    def local(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this process's units, (u,), and the sums of (B, …) over the rows of each, (u, …)."""
        numbers, place = self.number.unique(return_inverse=True)
        return numbers, values.new_zeros(len(numbers), *values.shape[1:]).index_add_(0, place, values)
