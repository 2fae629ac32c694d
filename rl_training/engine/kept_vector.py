"""A vector that outlives its step: it goes into the checkpoint, from which any number of processes can read it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rl_training.engine.shards import Shard
from rl_training.mathematics.vectors import SHARD, Vector, num_bytes


class KeptVector:
    """This process's entries of a vector of some step, as the shard says which they are."""

    def __init__(self, shard: Shard) -> None:
        self._layout = shard.layout
        # Start and stop in the whole parameter, and how many entries that has.
        self._places = {name: (*shard.cut(name, shard.rank), shard.numel(name)) for name in shard.trained}
        self.vector: Vector | None = None
        self.step: int | None = None  # that it is of

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.vector)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the step and this process's entries, in host memory; nothing before the first.

        The name of each says which entries it has, so that any number of processes can read them.
        """
        if self.step is None or self.vector is None:
            return {}
        shards = {}
        for name, part in self._layout.by_name(self.vector).items():
            start, stop, _ = self._places[name]
            if start < stop:
                shards[f"{SHARD}{start}.{stop}.{name}"] = part.cpu()
        return {"update_step": torch.tensor(self.step)} | shards

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` returned on one process or several; of nothing, it begins anew.

        ValueError for another model's, or where entries of this process are not there.
        """
        self.vector = self.step = None
        if "update_step" not in state:
            return
        sizes = {name: entries for name, (_, _, entries) in self._places.items()}
        shards = _shards_in(state, sizes)
        if shards.keys() != sizes.keys() or any(stop > sizes[name] for name in sizes for _, stop, _ in shards[name]):
            raise ValueError(
                f"the vector in the checkpoint is not of the {sum(sizes.values())} numbers that are trained: it "
                "belongs to another model. Delete its probes*.safetensors, and the probes start afresh"
            )
        # Copies: sums over a part depend, in the last bits, on where in memory it begins.
        self.vector = self._layout.vector([self._own(name, shards[name]) for name in self._layout.names])
        self.step = int(state["update_step"])

    def _own(self, name: str, shards: Iterable[tuple[int, int, Tensor]]) -> Tensor:
        """Returns this process's entries of a parameter, (n,), from parts that any processes kept."""
        first, last, _ = self._places[name]
        own = torch.empty(last - first, dtype=self._layout.dtype, device=self._layout.device)
        missing = last - first
        for start, stop, shard in shards:
            low, high = max(start, first), min(stop, last)
            if low < high:
                own[low - first : high - first] = shard[low - start : high - start]
                missing -= high - low
        if missing:
            raise ValueError(
                f"the vector in the checkpoint lacks {missing} entries of {name}: a process's file is missing"
            )
        return own


def _shards_in(state: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, list[tuple[int, int, Tensor]]]:
    """Returns the parts of each parameter in a checkpoint: start, stop, entries."""
    if "update" in state:  # of an earlier version: all parameters, one after another
        flat = state["update"]
        stops = list(itertools.accumulate(sizes.values()))
        if len(flat) != stops[-1]:
            return {}
        return {
            name: [(0, size, flat[stop - size : stop])] for (name, size), stop in zip(sizes.items(), stops, strict=True)
        }
    shards: dict[str, list[tuple[int, int, Tensor]]] = {}
    for key, shard in state.items():
        if key.startswith(SHARD):
            start, stop, name = key.removeprefix(SHARD).split(".", 2)
            shards.setdefault(name, []).append((int(start), int(stop), shard))
    return shards
