"""The update of the previous step, for `backward`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.entropy.data import BACKWARD
from rl_training.parallel.sharded_vector import ShardedVector
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Vector, num_bytes
from rl_training.statistics.running_variance import RunningVariance
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.reasons import FAILED, FIRST_STEP, STEP_NOT_MEASURED, STEP_TAKEN_AGAIN


@dataclass(frozen=True)
class UpdateState:
    """What a checkpoint keeps of the previous steps."""

    update: ShardedVector = field(default_factory=ShardedVector)  # δθ of the last step
    step: int = 0  # the number of that step; 0: there is no δθ
    errors: RunningVariance = field(default_factory=RunningVariance)  # variances of the products at the last steps


class PreviousUpdate:
    """Holds δθ of the previous step, and the running errors of the products.

    If a step's δθ cannot come from the formula, because there is none or weights are rounded, the weights before the
    step are kept until it has been taken, and δθ is their difference.

    Args:
        shard: This rank's entries of the parameters.
        error_decay: The weight of an optimizer step in these errors relative to the next one.
        state: The state saved in a checkpoint. None starts from scratch.

    Raises:
        UserError: The state belongs to another model.
    """

    def __init__(self, shard: Shard, error_decay: float, state: UpdateState | None = None) -> None:
        state = state or UpdateState()
        self._shard, self._layout = shard, shard.layout
        self.update: Vector | None = None  # δθ of `step`, this rank's entries; None if unknown
        # The parts are copied because the last bits of a sum depend on the memory address of its first entry.
        if state.step:  # not state.update, which may be empty on some ranks
            self.update = self._layout.vector(part.clone() for part in state.update.local(shard).values())
        self.step: int | None = state.step or None  # the last step; None before the first
        self._errors = state.errors  # variances of the products at the last steps
        self._begin_errors()
        self._old_weights: Mapping[str, Tensor] = {}  # the weights before `step` if they are kept, (n,) each
        self._reason: Unavailable | None = None  # why δθ of `step` is unknown
        self._error_decay = error_decay
        self.peak_bytes = 0  # bytes of all vectors that the last step held at once

    @property
    def state(self) -> UpdateState:
        """The state to save in a checkpoint: this rank's entries, in host memory."""
        if self.step is None or self.update is None:
            return UpdateState(errors=self._errors)
        entries = {name: part.cpu() for name, part in self._layout.by_name(self.update).items()}
        return UpdateState(ShardedVector.of(self._shard, entries), self.step, self._errors)

    def count_bytes(self, *vectors: Vector | None, extra_bytes: int = 0) -> None:
        """Raise `peak_bytes` to what a step holds at once: these vectors, and the δθ or weights that are kept here.

        Args:
            *vectors: The vectors. None counts 0, and a tensor in several vectors counts once.
            extra_bytes: Of whatever else is held.
        """
        parts = {id(part): part for vector in (self.update, *vectors) for part in vector or ()}
        held = num_bytes([*parts.values(), *self._old_weights.values()]) + extra_bytes
        self.peak_bytes = max(self.peak_bytes, held)

    def update_before(self, step: int) -> Vector | None:
        """Return δθ of step − 1, or None if it is unknown."""
        return self.update if self.step == step - 1 else None

    def reason(self, step: int) -> Unavailable | None:
        """Return why δθ of step − 1 is unknown, or None."""
        if self.step is None:
            return FIRST_STEP
        if self.step >= step:
            return STEP_TAKEN_AGAIN
        if self.step != step - 1:
            return STEP_NOT_MEASURED.formatted(step=step - 1)
        return self._reason

    def release(self) -> Vector | None:
        """Return the last δθ, if there is one, for the next one to be written over it. `keep` must follow."""
        update, self.update = self.update, None
        self._reason = FAILED.prefixed(f"step {self.step}")
        return update

    def keep(self, step: int, update: Vector | None, weights: Mapping[str, Tensor]) -> None:
        """Keep a step's δθ; if `update` is None, keep a copy of the weights before the step instead."""
        self.step = step
        self._begin_errors()
        self.update = update
        self._reason = None
        self._old_weights = {} if update is not None else {name: part.clone() for name, part in weights.items()}

    def keep_nothing(self, step: int, reason: Unavailable) -> None:
        """Record a step without keeping its δθ, for this reason."""
        self.step = step
        self._begin_errors()
        self._old_weights = {}
        self.forget(reason)

    def finish(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Calculate δθ from the weights after a step, if the weights before it are kept."""
        if self._old_weights and self.step == step:
            dtype = self._layout.dtype
            changes = (weights[name].to(dtype) - old.to(dtype) for name, old in self._old_weights.items())
            self.update = self._layout.vector(changes)
            self._old_weights = {}

    def forget(self, reason: Unavailable) -> None:
        """Discard δθ of the last step, and keep the reason."""
        self.update = None
        self._reason = reason.prefixed(f"step {self.step}")

    # --- error bars averaged over steps: one batch can miss rare responses and look too certain -----------------------

    def _begin_errors(self) -> None:
        """Begin a step that has no variances yet."""
        self._errors_with_step = self._errors_with_backward = self._errors

    def average_errors(self, variance: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the variances averaged over this and the last steps, and the number of batches behind each average.

        The step counts in its own averages at once. Whether it counts in later ones is decided by `commit_errors`.

        Args:
            variance: The step's own variances, (products, …).
            step: The step's number.
        """
        decay = self._error_decay
        self._errors_with_step = self._errors.add(variance, step, decay)
        backward_variance = torch.full_like(variance, torch.nan)
        backward_variance[BACKWARD] = variance[BACKWARD]
        self._errors_with_backward = self._errors.add(backward_variance, step, decay)
        average, batches = self._errors_with_step.average(decay)
        return average.view_as(variance), batches.view_as(variance)

    def commit_errors(self, is_formula: bool) -> None:
        """Keep the step's variances for later averages.

        Keep only that of `backward`, which does not use the step's own δθ, if the formula was not followed.
        """
        self._errors = self._errors_with_step if is_formula else self._errors_with_backward
