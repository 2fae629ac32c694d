"""The processes that train together, through torch.distributed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

CHECKSUM_BITS = 32  # of zlib.crc32

Result = TypeVar("Result")


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

    def most(self, number: int, device: torch.device) -> int:
        """Return the largest number of any rank. Collective.

        Args:
            number: This rank's.
            device: Where ranks exchange tensors.
        """
        return int(self.max(_exact(number, device)))

    def least(self, number: int, device: torch.device) -> int:
        """Return the smallest number of any rank. Collective, as `most`."""
        return -self.most(-number, device)

    def total(self, number: int, device: torch.device) -> int:
        """Return the sum of all ranks' numbers. Collective, as `most`."""
        return int(self.reduce(_exact(number, device)))

    def any(self, flag: Tensor) -> bool:
        """Return whether a flag is set on some rank, or a count above 0. Collective."""
        return float(self.reduce(flag.double())) > 0.0

    def anywhere(
        self, facts: Mapping[str, bool], device: torch.device, values: Mapping[str, object] | None = None
    ) -> dict[str, bool]:
        """Return by name whether each of these facts holds on some rank. Collective, in one exchange.

        Args:
            facts: Whether each holds on this rank. All ranks give the same names.
            device: Where ranks exchange tensors.
            values: Values of this rank whose fact is that ranks have different ones. Checksums of their `repr` are
                compared.

        >>> Ranks(1, torch.clone).anywhere({"late": True, "short": False}, torch.device("cpu"), {"named": ["reward"]})
        {'late': True, 'short': False, 'named': False}
        """
        values = values or {}
        checksums = [zlib.crc32(repr(value).encode()) for value in values.values()]
        # Ranks have the same checksum if each of its bits is set on all ranks or on none.
        bits = [checksum >> bit & 1 for checksum in checksums for bit in range(CHECKSUM_BITS)]
        here = torch.tensor([*facts.values(), *bits], dtype=torch.float64, device=device)
        counts = self.reduce(here).tolist()
        holds = {name: count > 0.0 for name, count in zip(facts, counts, strict=False)}
        for index, name in enumerate(values):
            first = len(facts) + index * CHECKSUM_BITS
            holds[name] = any(0.0 < count < self.count for count in counts[first : first + CHECKSUM_BITS])
        return holds

    def in_lockstep(
        self, parts: Sequence[Tensor], run: Callable[[Tensor], Result], filler: Tensor, count: int | None = None
    ) -> list[Result]:
        """Call `run` for each part, equally often on every rank, and return this rank's results. Collective.

        A forward or backward pass that gathers weights or sends gradients is a collective, so no rank may run more
        passes than another. Whatever runs several of them calls this instead of looping by itself.

        Args:
            parts: This rank's parts, such as the rows of each pass. May be empty.
            run: Runs one pass.
            filler: What a rank runs after its own parts, until all ranks have run equally many. Its results are
                dropped.
            count: The number of parts of the rank with the most. None: the ranks exchange it.
        """
        if count is None:
            count = self.most(len(parts), filler.device)
        results = [run(part) for part in parts]
        for _ in range(count - len(parts)):
            run(filler)
        return results


def _exact(number: int, device: torch.device) -> Tensor:
    return torch.tensor(float(number), dtype=torch.float64, device=device)


def all_ranks() -> Ranks:
    """Return the ranks of torch.distributed's default group, or this process alone if it is not initialized."""
    if not dist.is_initialized():
        return Ranks(1, torch.clone)
    return Ranks(dist.get_world_size(), _sum_over_ranks, dist.get_rank())


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total
