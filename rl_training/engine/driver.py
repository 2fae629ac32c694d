"""The driver: a training loop reports each optimizer step to it in six calls, and it runs the probes.

    begin(number)            before the first microbatch
    plan(…)                  once the sizes of the step's microbatches are known
    microbatch(…)            between the forward pass and the backward of each
    gradients_ready(…)       all gradients are in, averaged over processes; the parameters are still old
    stepped()                parameters and optimizer states have moved, or the loop has left the step out
    finish()                 returns the probes' estimates

Only the driver calls probes and times them. Hooks are set from `microbatch` to the next call; in between, only the
loop's own backward runs. The driver only reads: parameters and random streams are bitwise the same without probes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rl_training.engine.build_step import build_step
from rl_training.engine.context import StepContext
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.gradient_check import TermsCheck
from rl_training.engine.loss_check import MadeLoss
from rl_training.engine.probe import Probe
from rl_training.engine.recorder import LoopSpec, SeenPrompts, StepRecorder, StepShape
from rl_training.engine.requirements import Requirements, announcement, needs_of
from rl_training.engine.timing import SHARED, Clock
from rl_training.engine.verifier import UpdateVerifier, predicting, refuse_other_parameters
from rl_training.entropy.prediction import predict_entropy
from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.gradients.fold_reduction import FoldReduction
from rl_training.parallel.fsdp import reshard
from rl_training.policy.padding_check import PaddingCheck
from rl_training.policy.rng import preserve_rng
from rl_training.policy.rollout import Rollout
from rl_training.policy.rotary import preserve_rotary_tables
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate
from rl_training.step.data import StepData
from rl_training.step.needs import Need
from rl_training.step.runtime import Runtime

logger = logging.getLogger(__name__)


class StepDriver:
    """Runs probes at optimizer steps. See the module's docstring.

    ValueError when two probes have the same name, or ask for different folds or entropy gradients.
    """

    name = SHARED  # of its own state in a checkpoint, of its estimates and of its time

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.probes = tuple(probes)
        self._requirements = Requirements.of(probes)
        self.open_step: StepRecorder | None = None  # the step that has begun, if one has
        self._learned = SeenPrompts()
        self._rows: FoldRecorder | None = None  # these two while a training lasts
        self._memory: PreviousUpdate | None = None
        self._memory_state: Mapping[str, Tensor] = {}
        self._guard: UpdateVerifier | None = None
        self._runtime: Runtime | None = None
        self._seconds: Mapping[str, float] = {}  # of the last step, by name
        self._bytes_held = 0  # at most in it
        self._clock = Clock(torch.device("cpu"))

    def reset(self) -> None:
        """Forget earlier trainings, also in the probes: call it before a training that does not go on from a state."""
        self.close()
        self._memory_state, self._learned = {}, SeenPrompts()
        for probe in self.probes:
            probe.reset()

    def start(self, loop: LoopSpec) -> None:
        """Record which parameters are trained. Call it when training begins. A collective after one that failed."""
        self.close()
        self.end()
        self._loop = loop
        self._layout = loop.shard.layout
        loop.policy.shard, loop.policy.scorer.layer_rounding = loop.shard, loop.shard.layer_rounding
        loop.policy.in_lockstep = loop.ranks if loop.shard.gathers_weights else None
        self._padding, self._terms = PaddingCheck(), TermsCheck()
        self._clock = Clock(self._layout.device)
        needs, offload = self._requirements.needs, self._requirements.offload
        self._runtime = Runtime(loop.policy, loop.ranks, FoldReduction(loop.shard, self._clock.timed))
        for line in announcement(loop, self._requirements) if loop.ranks.number == 0 else ():
            logger.warning(line)  # a level at which it is seen
        if not needs:
            return
        self._rows = FoldRecorder(self._runtime.reduction, offload, self._requirements.rows_dtype)
        if Need.ENTROPY_GRADIENT in needs:
            self._memory = PreviousUpdate(loop.shard, self._requirements.entropy, offload)
            self._memory.load_state_dict(self._memory_state)
            self._guard = UpdateVerifier(loop.shard, self._memory, loop.ranks.reduce)

    def refuse_impossible_folds(self, shape: StepShape) -> None:
        """Raise ValueError, naming a number that would do, where the steps of a training cannot have these folds."""
        self._requirements.folds(shape, shape.sizes)

    # --- the six calls, in the order of a step -----------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Begin optimizer step `number`, counted from 1. A collective where it is measured."""
        self.open_step = StepRecorder(number, [probe for probe in self.probes if probe.measures_at(number)])
        if self.open_step.probes:
            with self._clock.timed():
                refuse_other_parameters(self._loop.shard)
                if self._guard is not None and self._memory is not None:
                    self._guard.detect_external_edits()
                    self._memory.count_bytes(more=0)

    def plan(self, sizes: Sequence[int] | None = None, responses_per_prompt: int | None = None) -> None:
        """Plan the folds of the step that has begun. A collective where it is measured and has sizes of its own.

        sizes  sequences of each of its microbatches on this rank; None: all of this is as in the loop's `shape`
        """
        step = self.open_step
        assert step is not None, "call begin(number) first"
        if step.probes:
            with self._clock.timed():
                step.sizes = sizes or self._loop.shape.sizes
                step.num_folds = self._requirements.num_folds
                step.responses_per_prompt = responses_per_prompt or self._loop.shape.responses_per_prompt
                step.folds = self._requirements.folds_of_step(
                    self._loop, sizes, step.responses_per_prompt, self._terms.allows_parts
                )
                if self._rows is not None:
                    self._rows.make_room(step.folds, needs_of(step.probes), is_sliced=len(step.folds) > len(step.sizes))

    def microbatch(self, rollout: Rollout, scores: Scores, loss: MadeLoss, seen: Scores | None = None) -> None:
        """Take a microbatch whose forward pass is done, and watch its backward.

        scores  that the loss is made of, with graph
        seen    kept instead of these scores: also covers tokens that the loss masks out
        """
        step = self.open_step
        assert step is not None, "call begin(number) first"
        self.finish_backward()
        step.rollouts.append(rollout)
        step.scores.append((seen or scores).detached())
        step.loss_settings = loss.settings or self._loop.loss_settings
        if step.probes:
            with self._clock.timed():
                step.other_terms |= loss.has_other_terms(scores, self._loop.shard.leaves.values())
                step.watch_loss(scores)
                if self._rows is not None:
                    self._rows.arm(step.planned_start)

    def finish_backward(self) -> None:
        """Remove the hooks before the next call: the loop's backward is over. A collective, if they were set."""
        if self._rows is not None:
            with self._clock.timed():
                self._rows.finish_backward()

    def drop_backward(self) -> None:
        """Remove the hooks, and what they caught: the loop's backward has failed, perhaps on this process alone."""
        if self._rows is not None:
            self._rows.drop_backward()

    def gradients_ready(self, rollout_number: int) -> None:
        """Run the probes just before the optimizer's step. A collective where the step is measured.

        rollout_number  number of the rollout that the step learns from, within this training
        """
        step = self.open_step
        assert step is not None
        self.finish_backward()
        self._learned.turn_to(rollout_number)
        step.is_ready = True
        if step.probes:
            with self._measurement_context():
                self._prepare(step)

    @contextlib.contextmanager
    def _measurement_context(self) -> Iterator[None]:
        """A context of the probes' own calculations: a loop may be in one of autocast, and a probe may draw."""
        device, model = self._layout.device, self._loop.policy.model
        with preserve_rng(device), preserve_rotary_tables(model), torch.autocast(device.type, enabled=False):
            yield

    def measuring(self) -> AbstractContextManager[None]:
        """A context whose time counts as the engine's, of what a loop does for the sake of measuring alone."""
        return self._clock.timed()

    def _prepare(self, step: StepRecorder) -> None:
        with self.measuring():
            assert self._runtime is not None, "call start(loop) first"
            data, prediction = self._data_of(step, self._runtime), None
            if self._memory is not None and (asking := predicting(step.probes)):
                prediction = predict_entropy(data, self._runtime, self._memory, needs_of(asking))
            step.view = view = StepContext(data, self._runtime, prediction)
            if self._guard is not None:
                self._guard.ready(data.optimizer, prediction, step.probes)
        for probe in step.probes:
            with self._clock.timed(probe.name):
                probe.prepare(view)
        reshard(self._loop.policy.model)  # a probe may have scored with a graph and gone no further

    def about_to_step(self) -> None:
        """Look at the weights right before the optimizer's step, where a loop knows when that is."""
        if self._guard is not None and self.open_step is not None and self.open_step.view is not None:
            self._guard.about_to_step()

    def stepped(self, made: bool = True) -> None:
        """Run the probes just after the optimizer's step. A collective where the step is measured.

        made  False where the loop has left the step out after `gradients_ready`
        """
        step = self.open_step
        if step is not None and made:
            self._learned.add(step.rollouts)  # also where this step is not measured: a later one on them may be
        if step is None or step.view is None:
            return
        if self._memory is not None:
            with self.measuring():
                self._memory.finish(step.number, self._loop.shard.weights())
        with self._measurement_context():
            for probe in step.probes:
                with self._clock.timed(probe.name):
                    probe.after_step(step.view)
            if self._guard is not None:
                with self.measuring():
                    step.check = self._guard.stepped(made)

    def skip_step(self) -> None:
        """Discard the step that has begun; called instead of `gradients_ready` when the loop leaves the step out."""
        self.open_step = None
        if self._rows is not None:
            self._rows.release()

    def finish(self) -> dict[str, dict[str, Estimate]]:
        """End the step, and free its gradients. Returns the estimates of each probe that measured it, by its name.

        The check of the step is the engine's. Nothing when no probe has measured it.
        """
        step, self.open_step = self.open_step, None
        answers: dict[str, dict[str, Estimate]] = {}
        if step is not None and step.view is not None:
            for probe in step.probes:
                with self._clock.timed(probe.name):
                    answers[probe.name] = probe.checked_results(step.number)
            if step.check:
                answers[self.name] = dict(step.check)
            num_folds = step.view.step.batch.num_folds
            vectors = max(probe.num_vectors(num_folds) for probe in step.probes)  # one probe after another
            of_engine = (part.most_bytes for part in (self._rows, self._memory) if part is not None)
            self._bytes_held = sum(of_engine) + vectors * self._layout.num_bytes
        if self._rows is not None:
            self._rows.release()
        self._seconds = self._clock.read()
        return answers

    # --- costs, state, end --------------------------------------------------------------------------------------------

    def costs(self, step_seconds: float) -> dict[str, float]:
        """Return what measuring the last step took: seconds by probe, their share of the step's, and bytes at once.

        `engine_seconds` are what probes share: hooks, the folds' gradients, the entropy gradient, checks.
        """
        share = sum(self._seconds.values()) / step_seconds
        costs = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        return costs | {"fraction_of_step": share, "buffer_bytes": float(self._bytes_held)}

    def end(self) -> None:
        """End what processes have in common: training has ended on all of them. A collective."""
        if self._runtime is not None:
            self._runtime.reduction.close()

    def close(self) -> None:
        """Remove every hook and free all vectors: training has ended, perhaps in the middle of a step."""
        self._memory_state, self._memory = self.state_dict(), None
        if self._rows is not None:
            self._rows.release()
        self.open_step = self._rows = self._guard = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed run needs beside the probes' own states: the last update, and errors."""
        return dict(self._memory_state) if self._memory is None else self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` returned."""
        self._memory_state = state
        if self._memory is not None:
            self._memory.load_state_dict(state)

    def _data_of(self, step: StepRecorder, runtime: Runtime) -> StepData:
        """Return the data of a step whose gradients are all in. A collective."""
        loop, joined = self._loop, step.join(self._loop.ranks)
        edited = None if self._guard is None else self._guard.edit_limit()
        padded = self._padding.limit(joined.rollout, loop.policy, loop.ranks.reduce)
        told = joined.rollout.sampling_mismatch
        mismatch = (loop.limits.sampling_mismatch if told is None else told) or edited or padded
        limits = step.limits(loop, self._learned.numbers, mismatch)
        return build_step(step, joined, limits, loop, runtime, self._rows, self._terms)
