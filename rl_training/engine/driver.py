"""Run the probes of any training loop, which reports each optimizer step in six calls.

    begin(number)            before the first microbatch
    plan(…)                  once the sizes of the step's microbatches are known
    microbatch(…)            between each microbatch's forward pass and its backward
    gradients_ready(…)       gradients are complete, averaged over ranks; the parameters are still old
    stepped()                parameters and optimizer states have moved, or the loop has left the step out
    finish()                 returns what the step leaves: the probes' estimates, and what hosts record of it

A call in another order is a RuntimeError that names the missing one. The step is then discarded, and the learning rate
is the schedule's again. A loop may also

    leave out plan(…)        if no probe measures the step, and microbatch(…) if nothing reads its scores
    plan(…) again            before the first microbatch
    skip_step()              before `stepped`: only time and costs are left. Then `finish`, or first `stepped`
    fail_step()              at any moment: the step is discarded, and may begin again
    finish_backward()        at any moment, once a backward has ended; drop_backward() once it has failed
    about_to_step()          at any moment, right before the optimizer's step; it counts after `gradients_ready`
    start(…), close()        at any moment; after `close` no step begins before the next `start`

and after any error, its own or of a call, it must call `fail_step` or `close`: a bounded step has changed the rate.

Probes run in these calls alone. Hooks are active from `microbatch` to the next call, while only the loop's
own backward runs. Probes only read: parameters and random streams are bitwise the same as without them, on a GPU with
deterministic kernels. A set KL changes the learning rate, and without a formula the weights (kl_bound.py).
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
from rl_training.engine.kl_bound import KLBound, share_of_entropy
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.loss_info import LossInfo
from rl_training.engine.measurer import Measurer
from rl_training.engine.open_step import OpenStep, SeenPrompts, StepPhase, enter
from rl_training.engine.probe import Probe
from rl_training.engine.probe_states import ProbeStates
from rl_training.engine.requirements import Requirements
from rl_training.engine.step_result import StepResult
from rl_training.policy.precision import isolated_from_training
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.passes import Passes

logger = logging.getLogger(__name__)

_BEFORE_READY = (StepPhase.BEGUN, StepPhase.PLANNED, StepPhase.FILLED)


@dataclass(frozen=True)
class _Training:
    """What takes part in a training, from `start` to the next one: states are read even once it is closed."""

    loop: LoopSpec
    passes: Passes
    bound: KLBound | None  # None if learning rates are the loop's own
    measurer: Measurer
    is_open: bool = True  # whether steps may begin

    def participants(self, is_measured: bool = True) -> list[KLBound | Measurer]:
        """Return what takes part in a step, in order: a prediction is made with the learning rate of the bound."""
        bound = [] if self.bound is None else [self.bound]
        return [*bound, self.measurer] if is_measured else [*bound]


class StepDriver:
    """Runs probes at optimizer steps. See the module's docstring.

    Args:
        probes: The probes, which may be none.
        target_kl_share: The KL divergence of every step as a share of the policy's entropy, which sets its learning
            rate even if no probe measures it. None leaves the loop's rate.

    Raises:
        UserError: Two probes have the same name, or ask for different folds or entropy gradients; or an impossible
            share.
    """

    def __init__(self, probes: Sequence[Probe], target_kl_share: float | str | None = None) -> None:
        self.probes = tuple(probes)
        self.kl_share = share_of_entropy(target_kl_share)
        self.costs = Costs(torch.device("cpu"))
        self._requirements = Requirements.of(self.probes)
        self._probe_states = ProbeStates(self.probes)
        self.seen_prompts = SeenPrompts()
        self._training: _Training | None = None
        self._open_step: OpenStep | None = None  # the current step, between `begin` and `finish`
        self._participants: Sequence[KLBound | Measurer] = ()  # those in the current step, in the order of their calls

    @property
    def is_needed(self) -> bool:
        """Whether it has probes or sets learning rates.

        If not, a host may leave out `start`, which reads the loop's shards and optimizer. The calls of a step then only
        keep its sequences.
        """
        return bool(self.probes) or self.kl_share is not None

    # --- what hosts may know of the current step ----------------------------------------------------------------------

    @property
    def has_step(self) -> bool:
        """Whether a step has begun that has neither ended nor failed."""
        return self._open_step is not None

    @property
    def awaits_gradients(self) -> bool:
        """Whether a step has begun whose gradients are not ready. Losses are then those of its microbatches."""
        return self._open_step is not None and self._open_step.phase in _BEFORE_READY

    @property
    def needs_scores(self) -> bool:
        """Whether anything here reads the scores of the current step."""
        return bool(self._participants)

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
        self._probe_states.values = {probe.name: kept[probe.name] for probe in self.probes}
        self.seen_prompts = SeenPrompts()
        requirements = self._requirements
        shard = loop.shard.with_fusion(requirements.fusion(loop.shard.layout))
        loop = dataclasses.replace(loop, shard=shard)
        self._training = None
        loop.policy.begin(shard, loop.ranks)
        self.costs = Costs(shard.layout.device)
        passes = Passes(loop.policy, loop.ranks, FoldReduction(shard, self.costs.timed))
        for line in announcement(loop, requirements) if loop.ranks.number == 0 else ():
            logger.warning(line)  # a level that loggers show by default
        bound = None
        if self.kl_share is not None:
            bound = KLBound(self.kl_share, loop, self.costs, kept[KLBound.name])
        measurer = Measurer(loop, requirements, passes, self._probe_states, self.costs, kept)
        self._training = _Training(loop, passes, bound, measurer)

    def refuse_impossible_folds(self, num_sequences: int, responses_per_prompt: int, num_ranks: int) -> None:
        """Raise UserError, naming a number that works, if full steps of a training cannot have the requested folds.

        `num_sequences` is that of a step on each rank.
        """
        self._requirements.refuse_impossible_folds(num_sequences // responses_per_prompt, num_ranks)

    # --- the six calls, in the order of a step ------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Begin optimizer step `number`, counted from 1. Collective if a probe measures the step."""
        if self._open_step is not None:
            self.fail_step()
            raise RuntimeError(f"call {StepPhase.FINISHED} before {StepPhase.BEGUN}")
        probes = [probe for probe in self.probes if probe.measures_at(number)]
        step = OpenStep(number, probes, phase=StepPhase.BEGUN if probes else StepPhase.PLANNED)
        if self.is_needed:
            self._participants = self._started().participants(is_measured=bool(probes))
        self._open_step = step
        if probes:
            self._started().measurer.begin()

    def plan(self, sizes: Sequence[int] | None = None, responses_per_prompt: int | None = None) -> None:
        """Plan the step's folds. Collective if the step is measured and `sizes` is given.

        `sizes` is the number of sequences in each microbatch on this rank. None: as the loop says.
        """
        step = self._enter(StepPhase.PLANNED, after=[StepPhase.BEGUN, StepPhase.PLANNED])
        if step.probes:
            self._started().measurer.plan(step, sizes, responses_per_prompt)

    def microbatch(self, rollout: Rollout, scores: Scores, loss: LossInfo, recorded: Scores | None = None) -> None:
        """Record a microbatch between its forward pass and its backward, and watch the backward.

        The loss is made of `scores`, with graph. If given, `recorded` is recorded instead: it covers masked tokens too.
        """
        step = self._enter(StepPhase.FILLED, after=[StepPhase.PLANNED, StepPhase.FILLED])
        self.finish_backward()
        step.add(rollout, (recorded or scores).detached())
        if step.probes:
            self._started().measurer.watch_backward(step, scores, loss)

    def finish_backward(self) -> None:
        """Remove the hooks after the loop's backward. Collective if hooks were set."""
        if self._training is not None and self._requirements.needs:
            with self.costs.timed():
                self._training.passes.reduction.finish()

    def drop_backward(self) -> None:
        """Remove the hooks and discard what they caught: the loop's backward failed, perhaps on this rank only."""
        if self._training is not None:
            self._training.passes.reduction.drop()

    def gradients_ready(self, rollout_number: int) -> None:
        """Run the probes just before the optimizer's step. Collective if the step is measured or bounded.

        `rollout_number` says which rollout of this training the step learns from.
        """
        after = [StepPhase.FILLED] if self.needs_scores else [StepPhase.PLANNED, StepPhase.FILLED]
        step = self._enter(StepPhase.READY, after)
        self.finish_backward()
        step.rollout_number = rollout_number
        step.seen_prompts = self.seen_prompts.of_rollout(rollout_number)
        for participant in self._participants:
            with self._isolated():
                participant.before_step(step)

    def about_to_step(self) -> None:
        """Read weights and gradients right before the optimizer's step, if the loop knows that moment."""
        step = self._open_step
        if step is not None and step.phase == StepPhase.READY and step.is_measured:
            self._started().measurer.about_to_step(step)

    def stepped(self, was_taken: bool = True) -> None:
        """Run the probes just after the optimizer's step. Collective if the step is measured or bounded.

        `was_taken` is False if the loop skipped the step after `gradients_ready`.
        """
        step = self._enter(StepPhase.STEPPED, after=[StepPhase.READY, StepPhase.SKIPPED])
        if was_taken:
            self.seen_prompts.add(step.rollout_number, step.rollouts)  # measured or not: a later step may be
        for participant in self._participants:
            with self._isolated():
                participant.after_step(step, was_taken)

    def skip_step(self) -> None:
        """Discard the current step: the loop leaves it out, or it has no loss that could be measured."""
        step = self._enter(StepPhase.SKIPPED, after=[*_BEFORE_READY, StepPhase.READY])
        if self._training is not None:
            self._training.passes.reduction.raise_error()
        self.fail_step()
        self._open_step = OpenStep(step.number, probes=(), phase=StepPhase.SKIPPED)

    def fail_step(self) -> None:
        """Discard the current step after a failure, perhaps on this rank only. Not collective.

        The loop may retry it. The next step does not use its update, unless it was taken and verified.
        """
        for participant in self._participants:
            participant.drop()
        self._participants = ()
        self._open_step = None

    def finish(self) -> StepResult:
        """End the step, free its gradients, and return what it leaves.

        Besides those of the probes, the engine's own entry in the estimates holds the verification of the step. A
        bounded step has an entry that says how it was bounded.
        """
        step = self._enter(StepPhase.FINISHED, after=[StepPhase.STEPPED, StepPhase.SKIPPED])
        self._participants = ()
        self._open_step = None
        self.costs.end_step(step.peak_bytes)
        return StepResult(
            self.costs.step_seconds,
            step.rollouts,
            step.scores,
            is_measured=bool(step.probes),
            estimates=step.estimates,
            costs=self.costs.by_name(),
        )

    def _enter(self, phase: StepPhase, after: Sequence[StepPhase]) -> OpenStep:
        """Return the current step, now in this phase. If it was in none of `after`, discard it: RuntimeError."""
        try:
            return enter(self._open_step, phase, after)
        except RuntimeError:
            self.fail_step()
            raise

    def _started(self) -> _Training:
        if self._training is None or not self._training.is_open:
            raise RuntimeError(f"call start(loop) before {StepPhase.BEGUN}")
        return self._training

    def _isolated(self) -> AbstractContextManager[None]:
        loop = self._started().loop
        return isolated_from_training(loop.policy.model, loop.shard.layout.device)

    # --- state, end ---------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Release what the ranks share, once training has ended on all of them. Collective."""
        if self._training is not None:
            self._training.passes.reduction.close()

    def close(self) -> None:
        """Remove every hook and free all vectors: training has ended, perhaps in the middle of a step."""
        self.fail_step()
        if self._training is not None:
            self._training.measurer.close()
            self._training = dataclasses.replace(self._training, is_open=False)

    def initial_states(self) -> dict[str, Any]:
        """Return the states at the start of a training run: the probes' by name, and the engine's own."""
        of_bound = {} if self.kl_share is None else KLBound.initial_states()
        return {**self._probe_states.initial(), **Measurer.initial_states(), **of_bound}

    def states(self) -> dict[str, Any]:
        """Return the states that a resumed run needs: the probes' by name, and the engine's own."""
        states = {**self.initial_states(), **self._probe_states.values}
        for participant in () if self._training is None else self._training.participants():
            states |= participant.states()
        return states
