"""A vector over the trained parameters as a value: every process has its entries, and any number of processes reads it.

Each slice says which entries of which parameter it holds. So a vector that two processes have written into a checkpoint
is assembled by three, whatever entries they keep.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.parallel.sharding import Shard


@dataclass(frozen=True)
class Slice:
    """Neighbouring entries of a parameter, which counts as flat."""

    start: int
    stop: int
    entries: Tensor  # (stop − start,); of a checkpoint, a slice of safetensors, which reads what it is indexed with


@dataclass(frozen=True)
class ShardedVector:
    """Slices of a vector: this process's, perhaps without entries, or those of all that wrote a checkpoint."""

    slices: Mapping[str, Sequence[Slice]] = field(default_factory=dict)  # by the parameter's name

    @classmethod
    def of(cls, shard: Shard, entries: Mapping[str, Tensor]) -> ShardedVector:
        """Return the vector of this process's entries, by name, (n,) each. They are not copied."""
        return cls({name: (Slice(*shard.cut(name, shard.rank), part),) for name, part in entries.items()})

    def local(self, shard: Shard) -> dict[str, Tensor]:
        """Return this process's entries by name, (n,) each, in the layout's order: its own, or assembled from others'.

        Raises:
            UserError: the vector is another model's, or lacks entries of this process.
        """
        sizes = {name: shard.numel(name) for name in shard.trained}
        kept = {name for name in sizes if operator.lt(*shard.cut(name, shard.rank))}  # no slice has no entries
        is_other = not kept <= self.slices.keys() <= sizes.keys()
        if is_other or any(part.stop > sizes[name] for name, parts in self.slices.items() for part in parts):
            raise UserError(
                f"the vector in the checkpoint is not of the {sum(sizes.values())} numbers that are trained: it "
                "belongs to another model. Delete its probes*.safetensors, and the probes start afresh"
            )
        return {name: _assemble(name, self.slices.get(name, ()), shard) for name in shard.layout.names}


def _assemble(name: str, slices: Sequence[Slice], shard: Shard) -> Tensor:
    first, last = shard.cut(name, shard.rank)
    layout = shard.layout
    for part in slices:
        is_kept_here = isinstance(part.entries, Tensor) and part.entries.device == layout.device
        if (part.start, part.stop) == (first, last) and is_kept_here:
            return part.entries
    entries = torch.empty(last - first, dtype=layout.dtype, device=layout.device)
    missing = last - first
    for part in slices:
        low, high = max(part.start, first), min(part.stop, last)
        if low < high:
            entries[low - first : high - first] = part.entries[low - part.start : high - part.start]
            missing -= high - low
    if missing:
        raise UserError(f"the vector in the checkpoint lacks {missing} entries of {name}: a process's file is missing")
    return entries
