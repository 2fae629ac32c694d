"""Measures a step: builds its data and its prediction, runs the probes, and checks the step once it has been taken.

The driver calls each of these at its moment of the step, and passes on the open step, which is filled here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.engine.build_step import StepBuilder
from rl_training.engine.context import StepContext
from rl_training.engine.costs import Costs
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.loss_info import LossInfo
from rl_training.engine.open_step import OpenStep
from rl_training.engine.predictions import NoPredictions, Predictions
from rl_training.engine.probe_states import ProbeStates
from rl_training.engine.requirements import Requirements
from rl_training.engine.step_checks import StepChecks
from rl_training.engine.step_reasons import with_seen_in_scores
from rl_training.entropy.previous_update import UpdateState
from rl_training.errors import UserError
from rl_training.optim.state import view_optimizer
from rl_training.optim.updates import sqrt_preconditioner
from rl_training.parallel.fsdp import reshard
from rl_training.parallel.sharding import Shard
from rl_training.policy.scores import Scores
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.residual import ResidualSums, ResidualTest
from rl_training.vocabulary import ENGINE


class Measurer:
    """Measures the steps of one training. It takes part in them by the same calls as KLBound, and by further ones.

    Args:
        loop: The training loop.
        requirements: What all probes require together.
        passes: Runs further passes.
        probe_states: The states of the probes, which change with each measured step.
        costs: Takes the time.
        states: The engine's own states at the start of the training, by name.
    """

    def __init__(
        self,
        loop: LoopSpec,
        requirements: Requirements,
        passes: Passes,
        probe_states: ProbeStates,
        costs: Costs,
        states: Mapping[str, Any],
    ) -> None:
        self._loop = loop
        self._requirements = requirements
        self._passes = passes
        self._probe_states = probe_states
        self._costs = costs
        self._fold_recorder = FoldRecorder(passes.reduction, requirements.offload, requirements.fold_dtype)
        self._checks = StepChecks.of(states[StepChecks.name])
        self._builder = StepBuilder(loop, requirements, passes, self._fold_recorder, self._checks)
        self._residual_test = ResidualTest(
            states[ResidualTest.name], loop.policy.scorer.temperature, loop.shard.layout.device
        )
        self._predictions: Predictions | NoPredictions = NoPredictions(states[ENGINE])
        if Need.ENTROPY_GRADIENT in requirements.needs:
            self._predictions = Predictions(loop, requirements, passes, states[ENGINE])

    # --- the moments of a measured step -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step that is measured. Collective."""
        with self._costs.timed():
            self._checks.begin()
            self._residual_test.begin()
            _refuse_other_parameters(self._loop.shard)
            self._predictions.begin()

    def plan(self, step: OpenStep, sizes: Sequence[int] | None, responses_per_prompt: int | None) -> None:
        """Plan the step's folds, and make room for what its probes need of them. Collective if `sizes` is given.

        Args:
            step: The step.
            sizes: The number of sequences in each microbatch on this rank. None: as the loop says.
            responses_per_prompt: None: as the loop says.
        """
        with self._costs.timed():
            step.sizes = sizes or self._loop.sizes
            step.responses_per_prompt = responses_per_prompt or self._loop.responses_per_prompt
            step.fold_groups = self._requirements.plan(self._loop, sizes, step.responses_per_prompt)
            sqrt_metric = None
            if Need.SQ_NORMS in step.needs:
                shard = self._loop.shard
                sqrt_metric = sqrt_preconditioner(shard.layout, shard.weights(), view_optimizer(shard).states)
            stores_vectors = Need.FOLD_GRADIENTS in step.needs
            self._fold_recorder.start_step(step.fold_groups, stores_vectors=stores_vectors, sqrt_metric=sqrt_metric)

    def watch_backward(self, step: OpenStep, scores: Scores, loss: LossInfo) -> None:
        """Set the hooks for the backward of the step's latest microbatch, and watch its loss.

        Args:
            step: The step, with this microbatch.
            scores: What the loss is made of, with graph.
            loss: What the loop tells about its loss.
        """
        shard = self._loop.shard
        with self._costs.timed():
            _refuse_other_parameters(shard)  # a leaf that was frozen since would take no hook
            step.loss_settings = loss.settings or self._loop.loss_settings
            step.other_terms = step.other_terms or loss.other_terms_reason(scores, shard.leaves.values())
            step.watch_loss(scores)
            self._fold_recorder.arm(step.planned_start)

    def before_step(self, step: OpenStep) -> None:
        """Run the probes of a step whose gradients are complete. Collective."""
        with self._costs.timed():
            step.context = self._context(step)
            step.watch_gradient(step.context.step, self._loop.shard)
        readings = {}
        for probe in sorted(step.probes, key=lambda probe: not probe.scores_responses):
            with self._costs.timed(probe.name):
                readings[probe.name] = self._probe_states.measure(probe, step.context)
                # the probe may have scored the responses
                step.context = with_seen_in_scores(step.context, self._residual_test.reason)
        step.readings = {probe.name: readings[probe.name] for probe in step.probes}
        reshard(self._loop.policy.model)  # a probe may have scored with a graph and run no backward

    def _context(self, step: OpenStep) -> StepContext:
        """Return what the probes are given: the step as data, and what it is predicted to do."""
        data = self._builder.build(step, self._predictions.edit_reason())
        prediction = self._predictions.predict(data, step.probes, self._residual_test)
        context = StepContext(data, self._passes, prediction, residual_test=self._residual_test)
        return with_seen_in_scores(context, self._residual_test.reason)

    def about_to_step(self, step: OpenStep) -> None:
        """Read weights and gradients of a measured step right before the optimizer's."""
        if step.witness is not None:
            step.witness.about_to_step()
        assert step.context is not None
        self._predictions.about_to_step(step.context.prediction_if_any)

    def after_step(self, step: OpenStep, was_taken: bool) -> None:
        """Run the probes after the optimizer's step, verify it, and keep the states that it leaves. Collective.

        Args:
            step: The measured step. Its readings become final.
            was_taken: False if the loop skipped the step.
        """
        context = step.context_after_step(self._loop.ranks)
        for probe in step.probes:
            with self._costs.timed(probe.name):
                reading = step.readings[probe.name]
                step.readings[probe.name] = self._probe_states.after_step(probe, context, reading)
        with self._costs.timed():  # if verification fails, states that came with predictions are dropped
            verification = self._predictions.verify(context.step, context.prediction_if_any, was_taken)
            step.readings = self._probe_states.commit(step.readings, verification.void_reason)
            step.verification = {**verification.estimates, **self._residual_test.finish(was_taken)}
        self._checks.finish(was_taken)
        step.peak_bytes = self._peak_bytes(step)
        self._fold_recorder.release()

    def _peak_bytes(self, step: OpenStep) -> int:
        """Return the most bytes of vectors that the engine and the probes held at once during a measured step."""
        return self._fold_recorder.peak_bytes + self._predictions.peak_bytes + step.bytes_of_probes()

    def drop(self) -> None:
        """Drop what was caught, predicted and checked of a step that has not been taken. Not collective."""
        self._predictions.drop()
        self._checks.finish(was_taken=False)
        self._fold_recorder.release()

    # --- state, end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free all vectors that no later training needs. The states stay."""
        self._predictions = NoPredictions(self._predictions.state)

    @staticmethod
    def initial_states() -> dict[str, Any]:
        """Return the engine's own states at the start of a training run, by name."""
        return {ENGINE: UpdateState(), ResidualTest.name: ResidualSums(), StepChecks.name: StepChecks().state}

    def states(self) -> dict[str, Any]:
        """Return the engine's own states that a resumed run needs, by name."""
        return {
            ENGINE: self._predictions.state,
            ResidualTest.name: self._residual_test.run,
            StepChecks.name: self._checks.state,
        }


def _refuse_other_parameters(shard: Shard) -> None:
    """Raise UserError if the trained parameters are no longer those that were trained when measuring began."""
    trained = {name for name, param in shard.model.named_parameters() if param.requires_grad}
    for name in sorted(trained ^ shard.trained.keys()):
        raise UserError(
            f"{name} is {'' if name in trained else 'not '}trained now, unlike when probes began to measure: freeze, "
            "unfreeze and untie before training, or train and measure each stage by itself"
        )
