"""What each step is predicted to do to entropy, and whether the step was what that was predicted for."""

from __future__ import annotations

from collections.abc import Sequence

from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.probe import Probe
from rl_training.engine.requirements import Requirements, needs_of
from rl_training.engine.verifier import UpdateVerifier
from rl_training.entropy.prediction import predict_entropy
from rl_training.entropy.previous_update import PreviousUpdate, UpdateState
from rl_training.parallel.sharding import Shard
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.limit import Limit
from rl_training.step.data import EntropyPrediction, StepData
from rl_training.step.limits import FAILED
from rl_training.step.needs import Need
from rl_training.step.runtime import Runtime


class Predictions:
    """The prediction of each step that a probe asks one of, made before the step and verified after it."""

    def __init__(self, loop: LoopSpec, requirements: Requirements, state: UpdateState) -> None:
        """Begin with what earlier steps have left. UserError where that is of another model."""
        self._shard: Shard = loop.shard
        self._memory = PreviousUpdate(loop.shard, requirements.entropy, requirements.offload, state)
        self._verifier = UpdateVerifier(loop.shard, self._memory, loop.ranks.reduce)
        self._unverified: int | None = None  # the number of a step that is predicted, until it is verified

    @property
    def state(self) -> UpdateState:
        """What they need of the steps so far."""
        return self._memory.state

    @property
    def most_bytes(self) -> int:
        """The bytes of all vectors that the last step held at once."""
        return self._memory.most_bytes

    def begin(self) -> None:
        """Look at the weights that a step begins with. A collective."""
        self._verifier.detect_external_edits()
        self._memory.count_bytes(more=0)

    def edit_limit(self) -> Limit | None:
        """Return the limit of a step in which weights were changed since it has begun, or None. A collective."""
        return self._verifier.edit_limit()

    def predict(self, step: StepData, runtime: Runtime, probes: Sequence[Probe]) -> EntropyPrediction | None:
        """Return what the step will do to entropy, as far as these probes ask for it. A collective."""
        asking = [probe for probe in probes if Need.ENTROPY_GRADIENT in probe.needs]
        self._unverified = step.number if asking else None
        prediction = predict_entropy(step, runtime, self._memory, needs_of(asking)) if asking else None
        self._verifier.snapshot(step.optimizer, prediction)
        return prediction

    def about_to_step(self) -> None:
        """Look at the weights right before the optimizer's step."""
        self._verifier.about_to_step()

    def stepped(self, number: int) -> None:
        """Learn what the step has done to the weights, where that is not known before it."""
        self._memory.finish(number, self._shard.weights())

    def fail_step(self) -> None:
        """Forget a prediction that is not verified: the step has failed, perhaps on this process alone."""
        if self._unverified is not None and self._memory.step == self._unverified:
            self._memory.leave_out(self._unverified, FAILED)
        self._unverified = None

    def verify(self, made: bool) -> tuple[dict[str, Estimate], Limit | None]:
        """Return what is known of how the step was made, and the limit of what was predicted for it. A collective.

        Args:
            made: False: the loop has left the step out.
        """
        self._unverified = None
        estimates, limit = self._verifier.verify(made)
        if estimates:
            self._memory.errors.commit(is_formula=limit is None)
        return estimates, limit
