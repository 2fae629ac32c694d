"""What each step is predicted to do to entropy, and whether the step was the one that was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.data import StepData
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.residual import ResidualTest


@dataclass
class _PredictedStep:
    """A predicted step, until it is verified. Weights are sampled ones."""

    number: int
    weights: Tensor  # when the probes see the step
    intended: Tensor | None  # what the formula adds to them. None if the optimizer has none, or no prediction
    no_formula: Unavailable | None  # the reason why there is no formula
    is_rounded: bool  # whether weights are rounded, so that the measured update takes the formula's place
    max_error: float  # of the step, relative to the formula's
    weights_before_step: Tensor | None = None  # right before the optimizer's step, if there is no formula


class Predictions:
    """Predicts each step for which a probe asks, before the step is taken, and verifies it afterwards.

    The calls of a measured step, in their order:

        begin              it begins: has anything changed the weights since the last one?
        begin_measuring    its gradients are complete: has anything changed the weights since it began?
        predict            it is predicted, or not
        about_to_step      right before the optimizer's step, if the loop knows that moment
        stepped            right after it: what was the update, if no formula gives it?
        verify             once probes have seen the step: is the change of the weights the formula's?

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
        self._weights_at_begin: Tensor | None = None  # sampled weights, as the next two: at the start of the step
        self._weights_at_measure = torch.empty(0)  # when the probes see the step
        self._weights_after_step: Tensor | None = None  # after the optimizer's step, if it was predicted
        self._step: _PredictedStep | None = None  # None if the current step is not predicted
        self.peak_bytes = 0  # the most bytes of vectors held at once during the last step

    @property
    def state(self) -> UpdateState:
        """What later predictions need to know about the steps so far."""
        return self._previous.state

    def begin(self) -> None:
        """Read the weights, and forget the previous step if the weights differ from those it ended with. Collective."""
        self._weights_at_begin = self._verifier.read_weights()
        after_step = self._weights_after_step
        if after_step is not None and self._verifier.differ(self._weights_at_begin, after_step):
            self._previous.forget(EDITED_AFTER_STEP)
        self._weights_after_step = None
        self.peak_bytes = self._previous.num_bytes

    def begin_measuring(self) -> Unavailable | None:
        """Read the weights that probes will see. Collective.

        Returns:
            The reason why the step's responses and gradients are not those of these weights, or None.
        """
        self._weights_at_measure = self._verifier.read_weights()
        at_begin = self._weights_at_begin
        if at_begin is not None and self._verifier.differ(at_begin, self._weights_at_measure):
            return EDITED_WITHIN_STEP
        return None

    def predict(self, step: StepData, probes: Sequence[Probe], test: ResidualTest) -> EntropyPrediction | None:
        """Return what these probes need to know about the step's effect on entropy, None if nothing. Collective.

        Args:
            step: The step, whose weights `begin_measuring` has read.
            probes: The probes that measure it.
            test: Receives the scores that the prediction is made of.
        """
        self._step = None
        asking = [probe for probe in probes if Need.ENTROPY_GRADIENT in probe.needs]
        if not asking:
            return None
        prediction, update = self._predictor.predict(step, needs_of(asking), self._previous, test)
        prediction = self._previous.advance(step, prediction, update)
        self.peak_bytes = max(self.peak_bytes, prediction.peak_bytes)
        unrounded = prediction.unrounded_update
        is_rounded = bool(step.optimizer.rounding_reason)
        self._step = _PredictedStep(
            number=step.number,
            weights=self._weights_at_measure,
            intended=None if unrounded is None else self._verifier.sample(unrounded),
            no_formula=prediction.reason or step.optimizer.reason,
            is_rounded=is_rounded,
            max_error=ROUNDED_WEIGHTS_TOLERANCE if is_rounded else step.optimizer.max_error,
        )
        return prediction

    def about_to_step(self) -> None:
        """Read the weights right before the optimizer's step. With a formula, `verify` detects earlier edits anyway."""
        if self._step is not None and self._step.intended is None:
            self._step.weights_before_step = self._verifier.read_weights()

    def stepped(self) -> None:
        """Measure the update from the weights after the step, if it was not known before."""
        if self._step is not None:
            self._previous.finish(self._step.number, self._shard.weights())

    def drop(self) -> None:
        """Discard an unverified prediction: the step has failed, perhaps on this rank only. Not collective."""
        if self._step is not None:
            self._previous.keep_nothing(self._step.number, FAILED)
        self._step = None

    def verify(self, prediction: EntropyPrediction | None, was_taken: bool) -> Verification:
        """Return how the step was taken, and whether its predictions hold. Collective.

        Args:
            prediction: What `predict` has returned, or what probes have left of it.
            was_taken: False if the loop skipped the step.
        """
        step, self._step = self._step, None
        if step is None:
            return Verification()
        self._weights_after_step = self._verifier.read_weights()
        if step.intended is None:
            verification = self._verify_without_formula(step, was_taken)
        else:
            verification = self._verify_formula(step, step.intended, self._weights_after_step, was_taken)
        if prediction is not None and prediction.variance_of_batch is not None:
            self._previous.add_errors(
                prediction.variance_of_batch,
                step.number,
                self._predictor.settings.error_decay,
                is_formula=verification.void_reason is None,
            )
        return verification

    def _verify_without_formula(self, step: _PredictedStep, was_taken: bool) -> Verification:
        """Forget the measured update if it is not the optimizer's alone. Collective."""
        if not was_taken:
            self._previous.forget(LEFT_OUT)
        elif step.weights_before_step is not None and self._verifier.differ(step.weights, step.weights_before_step):
            self._previous.forget(EDITED_BEFORE_STEP)
        assert step.no_formula is not None
        return Verification.missing(step.no_formula)

    def _verify_formula(
        self, step: _PredictedStep, intended: Tensor, weights_after_step: Tensor, was_taken: bool
    ) -> Verification:
        """Compare the change of the weights with the formula's, and forget a δθ that is neither. Collective."""
        estimates = self._verifier.compare(step.weights, weights_after_step - step.weights, intended)
        error = estimates[FORMULA_ERROR].value
        if was_taken and not error > step.max_error:  # also if it is nan: the gradient is not finite
            return Verification(estimates)
        if not was_taken or not self._verifier.differ(step.weights, weights_after_step):
            self._previous.forget(LEFT_OUT)
            return Verification(estimates, LEFT_OUT)
        reason = NOT_THE_FORMULA.formatted(error=error)
        if step.is_rounded:  # the update of rounded weights was measured, so it stays valid
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

    def begin_measuring(self) -> Unavailable | None:
        """Return None: whether weights are edited matters to predictions alone."""
        return None

    def predict(self, step: StepData, probes: Sequence[Probe], test: ResidualTest) -> EntropyPrediction | None:
        """Return None."""
        return None

    def about_to_step(self) -> None:
        """Read no weights."""

    def stepped(self) -> None:
        """Measure no update."""

    def drop(self) -> None:
        """Discard nothing."""

    def verify(self, prediction: EntropyPrediction | None, was_taken: bool) -> Verification:
        """Return that nothing was predicted."""
        return Verification()
