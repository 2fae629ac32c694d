"""What each step is predicted to do to entropy, and whether the step was the one that was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.probe import Probe, needs_of
from rl_training.engine.requirements import Requirements
from rl_training.engine.verifier import UpdateVerifier
from rl_training.entropy.attribution import Attribution
from rl_training.entropy.data import EntropyPrediction
from rl_training.entropy.prediction import EntropyPredictor
from rl_training.entropy.previous_update import FAILED, PreviousUpdate, UpdateState
from rl_training.parallel.sharding import Shard
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.data import StepData
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.residual import ResidualTest


class _Unverified(NamedTuple):
    """A predicted step that awaits verification."""

    number: int
    variance_of_batch: Tensor | None  # as in EntropyPrediction


class Predictions:
    """Predicts each step for which a probe asks, before the step is taken, and verifies it afterwards.

    Args:
        loop: The training loop.
        requirements: What the probes require together.
        passes: Runs further passes.
        state: What earlier steps have left. UserError if it belongs to another model.
    """

    def __init__(self, loop: LoopSpec, requirements: Requirements, passes: Passes, state: UpdateState) -> None:
        self._shard: Shard = loop.shard
        self._previous = PreviousUpdate(loop.shard, state)
        attribution, device = Attribution(loop.shard.layout.names), "cpu" if requirements.offload else None
        self._predictor = EntropyPredictor(requirements.entropy, attribution, passes, self._previous, device)
        self._verifier = UpdateVerifier(loop.shard, self._previous, loop.ranks)
        self._unverified: _Unverified | None = None
        self.peak_bytes = 0  # the most bytes of vectors held at once during the last step

    @property
    def state(self) -> UpdateState:
        """What later predictions need to know about the steps so far."""
        return self._previous.state

    def begin(self) -> None:
        """Read the weights at the start of a step. Collective."""
        self._verifier.begin_step()
        self.peak_bytes = self._previous.num_bytes

    def begin_measuring(self) -> Unavailable | None:
        """Read the weights that probes will see. Collective.

        Returns:
            That they were changed since the step began, or None.
        """
        return self._verifier.begin_measuring()

    def predict(self, step: StepData, probes: Sequence[Probe], test: ResidualTest) -> EntropyPrediction | None:
        """Return what these probes need to know about the step's effect on entropy, or None. Collective.

        Args:
            test: Receives the scores that the prediction is made of.
        """
        asking = [probe for probe in probes if Need.ENTROPY_GRADIENT in probe.needs]
        self._unverified = prediction = None
        if asking:
            prediction = self._predictor.predict(step, needs_of(asking), test)
            self._unverified = _Unverified(step.number, prediction.variance_of_batch)
            self.peak_bytes = max(self.peak_bytes, prediction.peak_bytes)
        self._verifier.expect(step.optimizer, prediction)
        return prediction

    def about_to_step(self) -> None:
        """Read the weights right before the optimizer's step."""
        self._verifier.about_to_step()

    def stepped(self, number: int) -> None:
        """Measure the update from the weights after the step, if it was not known before."""
        self._previous.finish(number, self._shard.weights())

    def fail_step(self) -> None:
        """Discard an unverified prediction: the step has failed, perhaps on this rank only."""
        if self._unverified is not None:
            self._previous.keep_nothing(self._unverified.number, FAILED)
        self._unverified = None

    def verify(self, was_taken: bool) -> tuple[dict[str, Estimate], Unavailable | None]:
        """Return estimates of how the step was taken, and why its predictions are void. Collective.

        Args:
            was_taken: False if the loop skipped the step.
        """
        unverified, self._unverified = self._unverified, None
        estimates, reason = self._verifier.verify(was_taken)
        if unverified is not None and unverified.variance_of_batch is not None:
            decay = self._predictor.settings.error_decay
            self._previous.add_errors(unverified.variance_of_batch, unverified.number, decay, is_formula=reason is None)
        return estimates, reason
