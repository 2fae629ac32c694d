"""A vector over the trained parameters as a value: each rank writes its entries, and any number of ranks can read them.

Each slice records which entries of which parameter it holds. So three ranks can assemble a vector from a checkpoint
that two ranks wrote, whichever entries they keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.parallel.sharding import Shard


@dataclass(frozen=True)
class Slice:
    """Neighbouring entries of a flattened parameter."""

    start: int
    stop: int
    entries: Tensor  # (stop − start,); from a checkpoint, a safetensors slice, which is read when it is indexed


@dataclass(frozen=True)
class ShardedVector:
    """Slices of a vector: this rank's, possibly empty, or those of all ranks that wrote a checkpoint."""

    slices: Mapping[str, Sequence[Slice]] = field(default_factory=dict)  # by the parameter's name

    @classmethod
    def of(cls, shard: Shard, entries: Mapping[str, Tensor]) -> ShardedVector:
        """Return the vector with this rank's entries, given by name, (n,) each. They are not copied."""
        return cls({name: (Slice(*shard.entry_range(name, shard.rank), part),) for name, part in entries.items()})

    def local(self, shard: Shard) -> dict[str, Tensor]:
        """Return this rank's entries by name, (n,) each, in the layout's order, assembled from slices if necessary.

        Raises:
            UserError: The vector belongs to another model, or lacks entries of this rank.
        """
        sizes = {name: shard.numel(name) for name in shard.trained}
        ranges = {name: shard.entry_range(name, shard.rank) for name in sizes}
        names_here = {name for name, (start, stop) in ranges.items() if start < stop}  # empty parts have no slice
        is_other_model = not names_here <= self.slices.keys() <= sizes.keys()
        if is_other_model or any(part.stop > sizes[name] for name, parts in self.slices.items() for part in parts):
            raise UserError(
                f"the vector in the checkpoint does not match the {sum(sizes.values())} numbers that are trained: it "
                "belongs to another model. Delete the checkpoint's probes*.safetensors to start the probes from scratch"
            )
        return {name: _assemble(name, self.slices.get(name, ()), shard) for name in shard.layout.names}


def _assemble(name: str, slices: Sequence[Slice], shard: Shard) -> Tensor:
    first, last = shard.entry_range(name, shard.rank)
    layout = shard.layout
    for part in slices:
        is_kept_here = isinstance(part.entries, Tensor) and part.entries.device == layout.device
        if (part.start, part.stop) == (first, last) and is_kept_here:
            return part.entries
    entries = torch.empty(last - first, dtype=layout.dtype, device=layout.device)
    missing = last - first
    for part in slices:
        low = max(part.start, first)
        high = min(part.stop, last)
        if low < high:
            entries[low - first : high - first] = part.entries[low - part.start : high - part.start]
            missing -= high - low
    if missing:
        raise UserError(f"the vector in the checkpoint lacks {missing} entries of {name}: a process's file is missing")
    return entries
