"""What each step is predicted to do to entropy, and whether the step was the one that was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.probe import Probe, needs_of
from rl_training.engine.requirements import Requirements
from rl_training.engine.verifier import (
    EDITED_AFTER_STEP,
    EDITED_BEFORE_STEP,
    EDITED_WITHIN_STEP,
    FORMULA_ERROR,
    LEFT_OUT,
    NOT_THE_FORMULA,
    NOT_TO_NEAREST,
    ROUNDED_WEIGHTS_TOLERANCE,
    UpdateVerifier,
    Verification,
)
from rl_training.entropy.attribution import Attribution
from rl_training.entropy.data import EntropyPrediction
from rl_training.entropy.prediction import EntropyPredictor
from rl_training.entropy.previous_update import FAILED, PreviousUpdate, UpdateState
from rl_training.optim.state import OptimizerView
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.data import StepData
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.residual import ResidualTest


@dataclass
class _WatchedStep:
    """The latest measured step, from its begin on. Weights are sampled ones."""

    weights: Tensor  # as last read before the optimizer's step: when it begins, then when probes see it
    peak_bytes: int  # the most bytes of vectors held at once
    unverified: int | None = None  # its number, while it is predicted and not yet verified
    weights_before_step: Tensor | None = None  # right before the optimizer's step, if that has no formula


class Predictions:
    """Predicts each step for which a probe asks, before the step is taken, and verifies it afterwards.

    What is known of a step is one value, made anew by `begin`. What it leaves to the next one is in `PreviousUpdate`,
    beside the weights that it ended with, which a step that fails before it is predicted does not change.
    The calls of a measured step, in their order:

        begin            it begins: has anything changed the weights since the last one?
        edit_reason      its gradients are complete: has anything changed the weights since it began?
        predict          what will it do? Its update takes the place of the previous one
        about_to_step    right before the optimizer's step, if the loop knows that moment
        verify           once probes have seen the step: is the change of the weights the formula's?

    Args:
        loop: The training loop.
        requirements: What the probes require together.
        passes: Runs further passes.
        state: What earlier steps have left. UserError if it belongs to another model.
    """

    def __init__(self, loop: LoopSpec, requirements: Requirements, passes: Passes, state: UpdateState) -> None:
        self._shard = loop.shard
        self._previous = PreviousUpdate(loop.shard, state)
        self._predictor = EntropyPredictor(
            requirements.entropy,
            Attribution(loop.shard.layout.names),
            passes,
            device="cpu" if requirements.offload else None,
        )
        self._verifier = UpdateVerifier(loop.shard, loop.ranks)
        self._step: _WatchedStep | None = None  # None before the first step, and after a predicted one that has failed
        self._weights_after_step: Tensor | None = None  # sampled when the last predicted step was verified

    @property
    def state(self) -> UpdateState:
        """What later predictions need to know about the steps so far."""
        return self._previous.state

    @property
    def peak_bytes(self) -> int:
        """The most bytes of vectors held at once during the latest step."""
        return 0 if self._step is None else self._step.peak_bytes

    def begin(self) -> None:
        """Read the weights, and forget the previous update if it has not led to them. Collective."""
        weights = self._verifier.read_weights()
        self._forget_if_edited(weights)
        self._step = _WatchedStep(weights, self._previous.num_bytes)

    def _forget_if_edited(self, weights: Tensor) -> None:
        """Forget the previous update if its step ended with other weights than these. Collective."""
        # Compared even if nothing is known of it: ranks that failed at different points must not wait for each other.
        ended_with = weights if self._weights_after_step is None else self._weights_after_step
        if self._verifier.differ(weights, ended_with):
            self._previous.forget(EDITED_AFTER_STEP)

    def edit_reason(self) -> Unavailable | None:
        """Read the weights that probes will see. Collective.

        Returns:
            The reason why the step's responses and gradients are not those of these weights, or None.
        """
        step = self._begun()
        at_begin = step.weights
        step.weights = self._verifier.read_weights()
        return EDITED_WITHIN_STEP if self._verifier.differ(at_begin, step.weights) else None

    def predict(self, data: StepData, probes: Sequence[Probe], test: ResidualTest) -> EntropyPrediction | None:
        """Return what these probes need to know about the step's effect on entropy, None if nothing. Collective.

        Args:
            data: The step, whose weights `edit_reason` has read.
            probes: The probes that measure it.
            test: Receives the scores that the prediction is made of.
        """
        asking = [probe for probe in probes if Need.ENTROPY_GRADIENT in probe.needs]
        if not asking:
            return None
        step = self._begun()
        prediction, step_update = self._predictor.predict(data, needs_of(asking), self._previous, test)
        prediction = self._previous.advance(data, prediction, step_update)
        step.unverified = data.number
        step.peak_bytes = max(step.peak_bytes, prediction.peak_bytes)
        return prediction

    def about_to_step(self, prediction: EntropyPrediction | None) -> None:
        """Read the weights right before the optimizer's step. With a formula, `verify` detects earlier edits anyway."""
        if prediction is not None and prediction.unrounded_update is None:
            self._begun().weights_before_step = self._verifier.read_weights()

    def verify(self, data: StepData, prediction: EntropyPrediction | None, was_taken: bool) -> Verification:
        """Return how the step was taken, and whether its predictions hold. Collective.

        Args:
            data: The step.
            prediction: What `predict` has returned, or what probes have left of it.
            was_taken: False if the loop skipped the step.
        """
        if prediction is None:
            return Verification()
        step = self._begun()
        self._previous.finish(data.number, self._shard.weights())
        self._weights_after_step = weights_after_step = self._verifier.read_weights()
        if prediction.unrounded_update is None:
            reason = prediction.reason or data.optimizer.reason
            verification = self._verify_without_formula(step, reason, was_taken)
        else:
            formula = self._verifier.sample(prediction.unrounded_update)
            verification = self._verify_formula(step, weights_after_step, formula, data.optimizer, was_taken)
        if prediction.variance_of_batch:
            self._previous.add_errors(
                prediction.variance_of_batch,
                data.number,
                self._predictor.settings.error_decay,
                is_formula=verification.void_reason is None,
            )
        step.unverified = None
        return verification

    def drop(self) -> None:
        """Discard an unverified prediction: the step has failed, perhaps on this rank only. Not collective."""
        if self._step is not None and self._step.unverified is not None:
            self._previous.keep_nothing(self._step.unverified, FAILED)
            self._step = None
            self._weights_after_step = None

    def _begun(self) -> _WatchedStep:
        assert self._step is not None
        return self._step

    def _verify_without_formula(self, step: _WatchedStep, reason: Unavailable | None, was_taken: bool) -> Verification:
        """Forget the measured update if it is not the optimizer's alone. Collective.

        Args:
            reason: Why there is no formula, or no prediction.
        """
        if not was_taken:
            self._previous.forget(LEFT_OUT)
        elif step.weights_before_step is not None and self._verifier.differ(step.weights, step.weights_before_step):
            self._previous.forget(EDITED_BEFORE_STEP)
        assert reason is not None
        return Verification.missing(reason)

    def _verify_formula(
        self, step: _WatchedStep, weights_after_step: Tensor, formula: Tensor, optimizer: OptimizerView, was_taken: bool
    ) -> Verification:
        """Compare the change of the weights with the formula's, and forget an update that is neither. Collective."""
        is_rounded = bool(optimizer.rounding_reason)
        max_error = ROUNDED_WEIGHTS_TOLERANCE if is_rounded else optimizer.max_error
        estimates = self._verifier.compare(step.weights, weights_after_step - step.weights, formula)
        error = estimates[FORMULA_ERROR].value
        if was_taken and not error > max_error:  # also if it is nan: the gradient is not finite
            return Verification(estimates)
        if not was_taken or not self._verifier.differ(step.weights, weights_after_step):
            self._previous.forget(LEFT_OUT)
            return Verification(estimates, LEFT_OUT)
        reason = NOT_THE_FORMULA.formatted(error=error)
        if is_rounded:  # the update of rounded weights was measured, so it stays valid
            return Verification(estimates, reason.with_fix(reason.fix + NOT_TO_NEAREST))
        self._previous.forget(reason)
        return Verification(estimates, reason)


class NoPredictions:
    """Takes the place of Predictions if no probe asks for any, and once a training is closed. The state stays.

    Args:
        state: What earlier steps have left.
    """

    peak_bytes = 0

    def __init__(self, state: UpdateState) -> None:
        self.state = state

    def begin(self) -> None:
        """Read no weights."""

    def edit_reason(self) -> Unavailable | None:
        """Return None: whether weights are edited matters to predictions alone."""
        return None

    def predict(self, data: StepData, probes: Sequence[Probe], test: ResidualTest) -> EntropyPrediction | None:
        """Return None."""
        return None

    def about_to_step(self, prediction: EntropyPrediction | None) -> None:
        """Read no weights."""

    def verify(self, data: StepData, prediction: EntropyPrediction | None, was_taken: bool) -> Verification:
        """Return that nothing was predicted."""
        return Verification()

    def drop(self) -> None:
        """Discard nothing."""
