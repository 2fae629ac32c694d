"""What earlier steps leave to the next prediction: the last update, for `backward`, and variances of the quantities."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_training.entropy.data import EntropyPrediction
from rl_training.optim.rounding import rounded_update
from rl_training.optim.updates import StepUpdate, compute_update
from rl_training.parallel.sharded_vector import ShardedVector
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Vector, num_bytes
from rl_training.statistics.running_variance import RunningVariance
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.data import StepData
from rl_training.step.reasons import STEP_TAKEN_AGAIN

FAILED = Unavailable("failed", "the step or its measurement failed, so its update was not verified")
FIRST_STEP = Unavailable(
    "first_step",
    "there is no earlier update to look back on: this is the first measured step, or the first one after a restart",
)
STEP_NOT_MEASURED = Unavailable(
    "step_not_measured",
    "step {step} was not measured, or not taken, so its update is not known; backward needs every=1, or steps=2",
)


@dataclass(frozen=True)
class UpdateState:
    """What a checkpoint keeps of the previous steps."""

    update: ShardedVector = field(default_factory=ShardedVector)  # δθ of the last step
    step: int = 0  # the number of that step; 0: there is no δθ
    errors: RunningVariance = field(default_factory=RunningVariance)  # variances of the quantities at the last steps


class PreviousUpdate:
    """Holds δθ of the previous step, and the variances of the last steps' quantities.

    A step's δθ takes the place of the previous one in a single call: `advance`, or `keep_nothing` if it stays unknown.
    If it cannot come from the formula, because there is none or weights are rounded, the weights before the step are
    kept until it has been taken, and δθ is their difference, which `finish` calculates.

    Args:
        shard: This rank's entries of the parameters.
        state: The state saved in a checkpoint. None starts from scratch.

    Raises:
        UserError: The state belongs to another model.
    """

    def __init__(self, shard: Shard, state: UpdateState | None = None) -> None:
        state = state or UpdateState()
        self._shard = shard
        self._layout = shard.layout
        self.update: Vector | None = None  # δθ of `step`, this rank's entries; None if unknown
        # The parts are copied because the last bits of a sum depend on the memory address of its first entry.
        if state.step:  # not state.update, which may be empty on some ranks
            self.update = self._layout.vector(part.clone() for part in state.update.local(shard).values())
        self.step: int | None = state.step or None  # the last step; None before the first
        self.errors = state.errors  # variances of the quantities at the last steps
        self._old_weights: Mapping[str, Tensor] = {}  # the weights before `step` if they are kept, (n,) each
        self._reason: Unavailable | None = None  # why δθ of `step` is unknown

    @property
    def state(self) -> UpdateState:
        """The state to save in a checkpoint: this rank's entries, in host memory."""
        if self.step is None or self.update is None:
            return UpdateState(errors=self.errors)
        entries = {name: part.cpu() for name, part in self._layout.by_name(self.update).items()}
        return UpdateState(ShardedVector.of(self._shard, entries), self.step, self.errors)

    @property
    def num_bytes(self) -> int:
        """The size of δθ, or of the weights that are kept until it is known."""
        return num_bytes(self.update) + num_bytes([*self._old_weights.values()])

    def update_before(self, step: int) -> Vector | None:
        """Return δθ of step − 1, or None if it is unknown. Valid until `advance`, which may write over it."""
        return self.update if self.step == step - 1 else None

    def reason(self, step: int) -> Unavailable | None:
        """Return the reason why δθ of step − 1 is unknown, or None."""
        if self.step is None:
            return FIRST_STEP
        if self.step >= step:
            return STEP_TAKEN_AGAIN
        if self.step != step - 1:
            return STEP_NOT_MEASURED.formatted(step=step - 1)
        return self._reason

    def advance(
        self, step: StepData, prediction: EntropyPrediction, step_update: StepUpdate | None
    ) -> EntropyPrediction:
        """Put a predicted step's δθ in the place of the previous one, and return the prediction with it.

        Unless `step_update` has it as a vector, it is written over the previous one. So call this only once everything
        has been multiplied with that.

        Args:
            step: The step, before it is taken.
            prediction, step_update: From `EntropyPredictor.predict`.
        """
        if prediction.reason and not prediction.is_seen_in_scores:
            self.keep_nothing(step.number, prediction.reason)
            return prediction
        weights = step.weights
        unrounded = rounded = self._write_over(step_update)
        if unrounded is not None and step.optimizer.rounding_reason:
            by_name = self._layout.by_name(unrounded)
            rounded = self._layout.vector(rounded_update(weight, by_name[name]) for name, weight in weights.items())
        is_known = unrounded is not None and not step.optimizer.rounding_reason
        self._old_weights = {} if is_known else {name: part.clone() for name, part in weights.items()}
        self.step = step.number
        self.update = rounded if is_known else None
        self._reason = None
        num_bytes_after = num_bytes(unrounded) + (0 if rounded is unrounded else num_bytes(rounded))
        peak_bytes = max(prediction.peak_bytes, num_bytes_after)
        return dataclasses.replace(prediction, unrounded_update=unrounded, update=rounded, peak_bytes=peak_bytes)

    def _write_over(self, step_update: StepUpdate | None) -> Vector | None:
        """Return δθ before rounding, written over the previous one unless `step_update` has it as a vector."""
        previous = self.update
        self.update = None
        self._reason = STEP_TAKEN_AGAIN  # stays if what follows fails
        if step_update is None:
            return None
        return step_update.vector or compute_update(self._layout, step_update, previous)

    def keep_nothing(self, step: int, reason: Unavailable) -> None:
        """Record a step without keeping its δθ, for this reason."""
        self.step = step
        self._old_weights = {}
        self.forget(reason)

    def finish(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Calculate δθ from the weights after a step, if the weights before it are kept."""
        if self._old_weights and self.step == step:
            dtype = self._layout.dtype
            differences = (weights[name].to(dtype) - old.to(dtype) for name, old in self._old_weights.items())
            self.update = self._layout.vector(differences)
            self._old_weights = {}

    def forget(self, reason: Unavailable) -> None:
        """Discard δθ of the last step, and keep the reason."""
        self.update = None
        self._reason = reason.prefixed(f"step {self.step}")

    def add_errors(self, variances: Mapping[str, Tensor], step: int, decay: float, *, is_formula: bool) -> None:
        """Add a verified step's `EntropyPrediction.variance_of_batch` to those that later averages are made of.

        If the step did not follow the formula, add only that of `backward`, which does not use the step's own δθ.
        """
        kept = [
            variance if is_formula or name == "backward" else torch.full_like(variance, torch.nan)
            for name, variance in variances.items()
        ]
        self.errors = self.errors.add(torch.cat(kept), step, decay)
