"""Run the probes of any training loop, which reports each optimizer step in six calls.

    begin(number)            before the first microbatch
    plan(…)                  once the sizes of the step's microbatches are known
    microbatch(…)            between each microbatch's forward pass and its backward
    gradients_ready(…)       gradients are complete, averaged over ranks; the parameters are still old
    stepped()                parameters and optimizer states have moved, or the loop has skipped the step
    finish()                 returns what the step leaves: the probes' estimates, and what hosts record of it

`plan`, `microbatch` and `gradients_ready` out of this order are a RuntimeError that names the missing call; a step that
no probe measures needs no `plan`. The others are not checked: after `gradients_ready`, a host must call `stepped` or
`fail_step`, since a bounded step has changed the learning rate. Five more are for hosts that know more:
`finish_backward` or `drop_backward` as soon as a backward has ended or failed, `about_to_step` right before the
optimizer's step, `skip_step` and `fail_step` if there is none.

Only the driver calls probes, times them and owns their states. Hooks are active from `microbatch` to the next call,
while only the loop's own backward runs. The driver only reads: parameters and random streams are bitwise the same as
without probes, on a GPU with deterministic kernels.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rl_training.engine.announcement import announcement
from rl_training.engine.costs import Costs
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.kl_bound import KLBound
from rl_training.engine.kl_search import BoundState
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.loss_info import LossInfo
from rl_training.engine.measurer import Measurer
from rl_training.engine.open_step import OpenStep, SeenPrompts, StepPhase, enter
from rl_training.engine.probe import Probe
from rl_training.engine.probe_states import ProbeStates
from rl_training.engine.requirements import Requirements
from rl_training.engine.step_result import StepResult
from rl_training.engine.verifier import refuse_other_parameters
from rl_training.policy.precision import isolated_from_training
from rl_training.policy.rollout import Rollout, join_rollouts
from rl_training.policy.scores import Scores
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.passes import Passes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Training:
    """What the driver needs of a training, from `start` to the next one: states are read even once it is closed."""

    loop: LoopSpec
    passes: Passes
    measurer: Measurer
    fold_recorder: FoldRecorder | None  # None if no probe needs gradients by fold


class StepDriver:
    """Runs probes at optimizer steps. See the module's docstring.

    UserError if two probes have the same name, or ask for different folds or entropy gradients.
    """

    def __init__(self, probes: Sequence[Probe], bound: KLBound | None = None) -> None:
        self.probes = tuple(probes)
        self._bound = bound  # even for steps that no probe measures
        self._requirements = Requirements.of(self.probes)
        self._states = ProbeStates(self.probes)
        self._open_step: OpenStep | None = None  # the current step, between `begin` and `finish`
        self._seen_prompts = SeenPrompts()
        self._training: _Training | None = None
        self.costs = Costs(torch.device("cpu"))

    @property
    def is_bounded(self) -> bool:
        """Whether the learning rate of every step is set from its KL divergence."""
        return self._bound is not None

    @property
    def is_needed(self) -> bool:
        """Whether it has probes or sets learning rates.

        If not, a host may leave out `start`, which reads the loop's shards and optimizer. The calls of a step then only
        keep its sequences.
        """
        return bool(self.probes) or self.is_bounded

    # --- what hosts may know of the current step ----------------------------------------------------------------------

    @property
    def has_step(self) -> bool:
        """Whether a step has begun that has neither ended nor been discarded."""
        return self._open_step is not None

    @property
    def awaits_gradients(self) -> bool:
        """Whether a step has begun whose gradients are not ready. Losses are then those of its microbatches."""
        return self._open_step is not None and self._open_step.phase not in (StepPhase.READY, StepPhase.STEPPED)

    @property
    def needs_scores(self) -> bool:
        """Whether anything here reads the scores of the current step."""
        return self._open_step is not None and bool(self._open_step.probes or self.is_bounded)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches that the current step has so far."""
        return 0 if self._open_step is None else len(self._open_step.rollouts)

    @property
    def lacks_backward(self) -> bool:
        """Whether no backward has reached the scores of the latest microbatch, as far as it was watched."""
        return self._open_step is not None and self._open_step.lacks_backward

    # --- the start of a training --------------------------------------------------------------------------------------

    def start(self, loop: LoopSpec, states: Mapping[str, Any] | None = None) -> None:
        """Begin a training run. Collective if the previous training failed.

        Args:
            loop: The training loop and its parameters.
            states: The states saved in a checkpoint, as returned by `states()`. None starts from scratch.
        """
        self.close()
        self.end()
        kept = {name: (states or {}).get(name, state) for name, state in self.initial_states().items()}
        self._states.values = {probe.name: kept[probe.name] for probe in self.probes}
        self._seen_prompts = SeenPrompts()
        requirements = self._requirements
        shard = loop.shard.with_fusion(requirements.fusion(loop.shard.layout))
        loop = dataclasses.replace(loop, shard=shard)
        self._training = None
        loop.policy.begin(loop.shard, loop.ranks)
        self.costs = Costs(shard.layout.device)
        passes = Passes(loop.policy, loop.ranks, FoldReduction(loop.shard, self.costs.timed))
        for line in announcement(loop, requirements) if loop.ranks.number == 0 else ():
            logger.warning(line)  # a level that loggers show by default
        if self._bound is not None:
            self._bound.start(loop.shard, loop.policy, loop.ranks, kept[self._bound.name])
        recorder = None
        if requirements.needs:
            recorder = FoldRecorder(passes.reduction, requirements.offload, requirements.rows_dtype)
        measurer = Measurer(loop, requirements, passes, recorder, self._states, self.costs, kept)
        self._training = _Training(loop, passes, measurer, recorder)

    def refuse_impossible_folds(self, num_sequences: int, responses_per_prompt: int, num_ranks: int) -> None:
        """Raise UserError, naming a number that works, if full steps of a training cannot have the requested folds.

        `num_sequences` is that of a step on each rank.
        """
        self._requirements.refuse_impossible_folds(num_sequences // responses_per_prompt, num_ranks)

    # --- the six calls, in the order of a step -----------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Begin optimizer step `number`, counted from 1. Collective if a probe measures the step."""
        probes = [probe for probe in self.probes if probe.measures_at(number)]
        self._open_step = OpenStep(number, probes, phase=StepPhase.BEGUN if probes else StepPhase.PLANNED)
        if probes:
            self._started().measurer.begin()

    def plan(self, sizes: Sequence[int] | None = None, responses_per_prompt: int | None = None) -> None:
        """Plan the step's folds. Collective if the step is measured and `sizes` is given.

        `sizes` is the number of sequences in each microbatch on this rank. None: as the loop says.
        """
        step = enter(self._open_step, StepPhase.PLANNED, after=[StepPhase.BEGUN, StepPhase.PLANNED])
        if step.probes:
            training = self._started()
            with self.costs.timed():
                step.sizes = sizes or training.loop.sizes
                step.responses_per_prompt = responses_per_prompt or training.loop.responses_per_prompt
                step.folds = self._requirements.plan(training.loop, sizes, step.responses_per_prompt)
                if training.fold_recorder is not None:
                    training.fold_recorder.start_step(step.folds, step.needs)

    def microbatch(self, rollout: Rollout, scores: Scores, loss: LossInfo, recorded: Scores | None = None) -> None:
        """Record a microbatch between its forward pass and its backward, and watch the backward.

        The loss is made of `scores`, with graph. If given, `recorded` is recorded instead: it covers masked tokens too.
        """
        step = enter(self._open_step, StepPhase.FILLED, after=[StepPhase.PLANNED, StepPhase.FILLED])
        self.finish_backward()
        at_start = None if self._training is None else self._training.loop.loss_settings
        step.add(rollout, (recorded or scores).detached(), loss.settings or at_start)
        if step.probes:
            training = self._started()
            shard = training.loop.shard
            with self.costs.timed():
                refuse_other_parameters(shard)  # a leaf that was frozen since would take no hook
                step.other_terms = step.other_terms or loss.other_terms_reason(scores, shard.leaves.values())
                step.watch_loss(scores)
                if training.fold_recorder is not None:
                    training.fold_recorder.arm(step.planned_start)

    def finish_backward(self) -> None:
        """Remove the hooks after the loop's backward. Collective if hooks were set."""
        if self._fold_recorder is not None:
            with self.costs.timed():
                self._fold_recorder.reduction.finish()

    def drop_backward(self) -> None:
        """Remove the hooks and discard what they caught: the loop's backward failed, perhaps on this rank only."""
        if self._fold_recorder is not None:
            self._fold_recorder.reduction.drop()

    def gradients_ready(self, rollout_number: int) -> None:
        """Run the probes just before the optimizer's step. Collective if the step is measured or bounded.

        `rollout_number` says which rollout of this training the step learns from.
        """
        after = [StepPhase.FILLED] if self.needs_scores else [StepPhase.PLANNED, StepPhase.FILLED]
        step = enter(self._open_step, StepPhase.READY, after)
        self.finish_backward()
        if self._bound is not None:
            with self._isolated(), self.costs.timed(self._bound.name):
                rollout = join_rollouts(step.rollouts)
                self._bound.before_step(rollout, step.join_scores(rollout))
        self._seen_prompts.start_rollout(rollout_number)
        if step.probes:
            with self._isolated():
                self._started().measurer.measure(step, self._seen_prompts.numbers)

    def about_to_step(self) -> None:
        """Read weights and gradients right before the optimizer's step, if the loop knows that moment."""
        if self._open_step is not None and self._open_step.is_measured:
            self._started().measurer.about_to_step(self._open_step)

    def stepped(self, was_taken: bool = True) -> None:
        """Run the probes just after the optimizer's step. Collective if the step is measured or bounded.

        `was_taken` is False if the loop skipped the step after `gradients_ready`.
        """
        step = self._open_step
        if self._bound is not None:
            with self._isolated(), self.costs.timed(self._bound.name):
                self._bound.end_step(was_taken)
        if step is not None and was_taken:
            self._seen_prompts.add(step.rollouts)  # even if it is not measured: a later step on these prompts may be
        if step is not None and step.phase == StepPhase.READY:
            step.phase = StepPhase.STEPPED
            if step.is_measured:
                with self._isolated():
                    self._started().measurer.complete(step, was_taken)

    def _started(self) -> _Training:
        if self._training is None:
            raise RuntimeError(f"call start(loop) before {StepPhase.BEGUN}")
        return self._training

    @property
    def _fold_recorder(self) -> FoldRecorder | None:
        return None if self._training is None else self._training.fold_recorder

    def _isolated(self) -> AbstractContextManager[None]:
        loop = self._started().loop
        return isolated_from_training(loop.policy.model, loop.shard.layout.device)

    def skip_step(self) -> None:
        """Discard the current step; called instead of `gradients_ready` if the loop skips the step."""
        if self._bound is not None:
            self._bound.restore()
        self._open_step = None
        if self._training is not None:
            self._training.passes.reduction.raise_error()
        self._release_folds()

    def fail_step(self) -> None:
        """Discard the current step after a failure, perhaps on this rank only. Not collective.

        The loop may retry it. The next step does not use its update, unless it was taken and verified.
        """
        if self._bound is not None:
            self._bound.restore()
        self._open_step = None
        self._release_folds()
        if self._training is not None:
            self._training.measurer.fail_step()

    def finish(self) -> StepResult:
        """End the step, free its gradients, and return what it leaves.

        Besides those of the probes, the engine's own entry in the estimates holds the verification of the step. A
        bounded step has an entry that says how it was bounded.
        """
        step, self._open_step = self._open_step, None
        estimates = {} if step is None else step.estimates
        num_bytes = None
        if step is not None and step.is_measured:
            num_bytes = self._started().measurer.peak_bytes + step.bytes_of_probes()
        self._release_folds()
        self.costs.end_step(num_bytes)
        if self._bound is not None and self._bound.estimates:
            estimates[self._bound.name] = self._bound.estimates
            self._bound.estimates = {}
        if step is None:
            return StepResult(self.costs.step_seconds)
        return StepResult(
            self.costs.step_seconds, step.rollouts, step.scores, bool(step.probes), estimates, self.costs.by_name()
        )

    def _release_folds(self) -> None:
        if self._fold_recorder is not None:
            self._fold_recorder.release()

    # --- state, end ---------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Release what the ranks share, once training has ended on all of them. Collective."""
        if self._training is not None:
            self._training.passes.reduction.close()

    def close(self) -> None:
        """Remove every hook and free all vectors: training has ended, perhaps in the middle of a step."""
        if self._bound is not None:
            self._bound.restore()
        if self._training is not None:
            self._training.measurer.close()
        self._release_folds()
        self._open_step = None

    def initial_states(self) -> dict[str, Any]:
        """Return the states at the start of a training run: the probes' by name, and the engine's own."""
        of_bound = {} if self._bound is None else {self._bound.name: BoundState()}
        return {**self._states.initial(), **Measurer.initial_states(), **of_bound}

    def states(self) -> dict[str, Any]:
        """Return the states that a resumed run needs: the probes' by name, and the engine's own."""
        of_engine = Measurer.initial_states() if self._training is None else self._training.measurer.states()
        of_bound = {} if self._bound is None else {self._bound.name: self._bound.state}
        return {**self._states.values, **of_engine, **of_bound}
