"""A vector of some step, of which every process has its entries: kept between steps, and in checkpoints.

Any number of processes can read it from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import SHARD, Vector
from rl_training.statistics.running_variance import RunningVariance

ERRORS = {"variances", "steps"}  # what an average of errors keeps
ERROR = "error."  # how names of averaged errors begin in a checkpoint


class ShardedVectorState:
    """This process's entries of a vector of some step, and averaged errors of the last steps."""

    def __init__(self, shard: Shard, error_decay: float) -> None:
        """Begin without a vector.

        Args:
            shard: says which entries this process keeps.
            error_decay: the weight of an optimizer step relative to the next one, measured or not, in the average of
                variances.
        """
        self._layout = shard.layout
        # Start and stop in the whole parameter, and its number of entries.
        self._places = {name: (*shard.cut(name, shard.rank), shard.numel(name)) for name in shard.trained}
        self.vector: Vector | None = None
        self.step: int | None = None  # that it is of
        self.errors = RunningVariance(error_decay)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the errors, and once there is a vector its step and this process's entries in host memory.

        A tensor's name says which entries it holds, so that any number of processes can read it.
        """
        state = {f"{ERROR}{name}": value for name, value in self.errors.state_dict().items()}
        if self.step is None or self.vector is None:
            return state
        for name, part in self._layout.by_name(self.vector).items():
            start, stop, _ = self._places[name]
            if start < stop:
                state[f"{SHARD}{start}.{stop}.{name}"] = part.cpu()
        return state | {"update_step": torch.tensor(self.step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned on one process or several. An empty state begins without a vector.

        Raises:
            UserError: the state is another model's or another version's, or lacks entries of this process.
        """
        errors = {k.removeprefix(ERROR): v for k, v in state.items() if k.startswith(ERROR)}
        if errors and errors.keys() != ERRORS:
            raise UserError(
                f"the checkpoint keeps {', '.join(sorted(errors))} of the errors of steps, where "
                f"{', '.join(sorted(ERRORS))} are read: another version has written it. Delete its "
                "probes*.safetensors, and the probes start afresh"
            )
        self.errors.load_state_dict(errors)
        self.vector = self.step = None
        if "update_step" not in state:
            return
        sizes = {name: entries for name, (_, _, entries) in self._places.items()}
        shards = _shards_in(state)
        if shards.keys() != sizes.keys() or any(stop > sizes[name] for name in sizes for _, stop, _ in shards[name]):
            raise UserError(
                f"the vector in the checkpoint is not of the {sum(sizes.values())} numbers that are trained: it "
                "belongs to another model. Delete its probes*.safetensors, and the probes start afresh"
            )
        # Copies: sums over a part depend, in the last bits, on where in memory it begins.
        self.vector = self._layout.vector([self._assemble(name, shards[name]) for name in self._layout.names])
        self.step = int(state["update_step"])

    def _assemble(self, name: str, shards: Iterable[tuple[int, int, Tensor]]) -> Tensor:
        """Assemble this process's entries of a parameter, (n,), from the parts that any processes kept."""
        first, last, _ = self._places[name]
        entries = torch.empty(last - first, dtype=self._layout.dtype, device=self._layout.device)
        missing = last - first
        for start, stop, shard in shards:
            low, high = max(start, first), min(stop, last)
            if low < high:
                entries[low - first : high - first] = shard[low - start : high - start]
                missing -= high - low
        if missing:
            raise UserError(
                f"the vector in the checkpoint lacks {missing} entries of {name}: a process's file is missing"
            )
        return entries


def _shards_in(state: Mapping[str, Tensor]) -> dict[str, list[tuple[int, int, Tensor]]]:
    """Return the parts of each parameter in a checkpoint: start, stop, entries."""
    shards: dict[str, list[tuple[int, int, Tensor]]] = {}
    for key, shard in state.items():
        if key.startswith(SHARD):
            start, stop, name = key.removeprefix(SHARD).split(".", 2)
            shards.setdefault(name, []).append((int(start), int(stop), shard))
    return shards
