"""The update of the step before, for `backward`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rl_training.entropy.attribution import Attribution
from rl_training.entropy.averaged_errors import AveragedErrors
from rl_training.parallel.sharded_vector import ShardedVector
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Vector, num_bytes
from rl_training.statistics.limit import Limit
from rl_training.statistics.running_variance import RunningVariance
from rl_training.step.data import EntropySettings
from rl_training.step.limits import FIRST_STEP, STEP_NOT_MEASURED, STEP_TAKEN_AGAIN


@dataclass(frozen=True)
class UpdateState:
    """What a checkpoint keeps of the steps so far."""

    update: ShardedVector = field(default_factory=ShardedVector)  # δθ of the last step
    step: int = 0  # that it is of; 0: of none
    errors: RunningVariance = field(default_factory=RunningVariance)  # of the products, at the last steps


class PreviousUpdate:
    """δθ of the step before, beside what is the same for all steps and the errors of their products (`errors`).

    Where a step has no formula, or weights are rounded, the weights before it are kept until it has been taken.
    """

    def __init__(
        self, shard: Shard, settings: EntropySettings, offload: bool = False, state: UpdateState | None = None
    ) -> None:
        """Begin with what a checkpoint has kept, or without it with nothing.

        Raises:
            UserError: the state is of another model.
        """
        state = state or UpdateState()
        self._shard, self._layout = shard, shard.layout
        self.vector: Vector | None = None  # this process's entries
        # Copies: sums over a part depend, in the last bits, on where in memory it begins.
        if state.step:  # the same on every rank, some of which may have no entries
            self.vector = self._layout.vector(part.clone() for part in state.update.local(shard).values())
        self.step: int | None = state.step or None  # that the vector is of
        self.errors = AveragedErrors(state.errors, settings.error_decay)
        self._before: Mapping[str, Tensor] = {}  # the kept weights, (n,) each
        self._limit: Limit | None = None  # why δθ of the kept step is not known
        self.settings = settings
        self.device = "cpu" if offload else None  # of tensors by fold; None: the parameters' device
        self.most_bytes = 0  # of all vectors that the last step held at once
        self.attribution = Attribution(shard.layout.names)

    @property
    def state(self) -> UpdateState:
        """What a checkpoint keeps; of this process's entries, in host memory."""
        if self.step is None or self.vector is None:
            return UpdateState(errors=self.errors.kept)
        entries = {name: part.cpu() for name, part in self._layout.by_name(self.vector).items()}
        return UpdateState(ShardedVector.of(self._shard, entries), self.step, self.errors.kept)

    def count_bytes(self, *vectors: Vector | None, more: int) -> None:
        """Set `most_bytes` for a step that holds these vectors at once, beside the δθ or weights that are kept here.

        Args:
            vectors: None counts as nothing; a tensor that several share counts once.
            more: the number of further vectors of the layout's size.
        """
        parts = {
            id(part): part for vector in (self.vector, *vectors) for part in vector or ()
        }  # shared tensors count once
        self.most_bytes = num_bytes([*parts.values(), *self._before.values()]) + more * self._layout.num_bytes

    def before(self, step: int) -> Vector | None:
        """Return δθ of step − 1; None where it is not known."""
        return self.vector if self.step == step - 1 else None

    def limit(self, step: int) -> Limit | None:
        """Return the limit of `backward` where δθ of step − 1 is not known, or None."""
        if self.step is None:
            return FIRST_STEP
        if self.step >= step:
            return STEP_TAKEN_AGAIN
        if self.step != step - 1:
            return STEP_NOT_MEASURED.filled(step=step - 1)
        return self._limit

    def keep(self, step: int, update: Vector | None, weights: Mapping[str, Tensor]) -> None:
        """Keep a step's δθ, or without one a copy of the weights that the step starts from."""
        self.step = step
        self.errors.begin()
        self.vector = update
        self._limit = None
        self._before = {} if update is not None else {name: part.clone() for name, part in weights.items()}

    def leave_out(self, step: int, limit: Limit) -> None:
        """Keep nothing of a step, because of this limit."""
        self.step = step
        self.errors.begin()
        self._before = {}
        self.forget(limit)

    def finish(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Calculate δθ of a step whose weights are kept, from the weights after it."""
        if self._before and self.step == step:
            dtype = self._layout.dtype
            changes = (weights[name].to(dtype) - before.to(dtype) for name, before in self._before.items())
            self.vector = self._layout.vector(changes)
            self._before = {}

    def forget(self, limit: Limit) -> None:
        """Discard δθ of the kept step, because the optimizer took another one."""
        self.vector = None
        self._limit = limit.prefixed(f"step {self.step}")
