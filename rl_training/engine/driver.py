"""The driver: a training loop reports each optimizer step to it in five calls, and it runs the probes.

    begin(number, …)         before the first microbatch
    microbatch(…)            between the forward pass and the backward of each
    gradients_ready(…)       all gradients are in, averaged over processes; the parameters are still old
    stepped()                parameters and optimizer states have moved
    finish()                 returns the probes' estimates

Only the driver calls probes and times them. Hooks are set from `microbatch` to the next call; in between, only the
loop's own backward runs. The driver only reads: parameters, random streams and rollouts are bitwise the same with
and without probes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rl_training.engine.batch import Rollout, join_rollouts
from rl_training.engine.clock import Clock
from rl_training.engine.entropy_change import measure_entropy_change
from rl_training.engine.fold_reduction import FoldReduction
from rl_training.engine.gradient_rows import GradientRows
from rl_training.engine.loss_terms import MadeLoss, TermsCheck
from rl_training.engine.memory import StepMemory
from rl_training.engine.open_step import Loop, OpenStep, Shape
from rl_training.engine.optimizer import gradients_and_states, view_optimizer
from rl_training.engine.padding import PaddingCheck
from rl_training.engine.probe import Need, Probe
from rl_training.engine.requirements import Requirements, announcement, needs_of
from rl_training.engine.rotary import tables_put_back
from rl_training.engine.shards import reshard
from rl_training.engine.step import Gradients, Step
from rl_training.engine.step_check import StepGuard, predicting, refuse_other_parameters, why_not_the_sum
from rl_training.engine.streams import streams_put_back
from rl_training.engine.updates import adam_roots
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.scores import Scores

logger = logging.getLogger(__name__)


class StepDriver:
    """Runs probes at optimizer steps. See the module's docstring.

    ValueError when two probes have the same name, or ask for different folds or entropy gradients.
    """

    name = "engine"  # of its own state in a checkpoint

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.probes = tuple(probes)
        self._requirements = Requirements.of(probes)
        self.open_step: OpenStep | None = None  # the step that has begun, if one has
        self._rollout_number, self._learned = 0, set[int]()  # the latest; prompts of it that a step has learned from
        self._rows: GradientRows | None = None  # these two while a training lasts
        self._memory: StepMemory | None = None
        self._memory_state: Mapping[str, Tensor] = {}
        self._guard: StepGuard | None = None

    def reset(self) -> None:
        """Forget earlier trainings, also in the probes: call it before a training that does not go on from a state."""
        self.close()
        self._memory_state = {}
        self._rollout_number, self._learned = 0, set()
        for probe in self.probes:
            probe.reset()

    def start(self, loop: Loop) -> None:
        """Records which parameters are trained. Call it when training begins."""
        self.close()
        self._loop = loop
        self._layout = loop.shard.layout
        loop.policy.shard, loop.policy.scorer.why_rounded = loop.shard, loop.shard.why_rounded
        loop.policy.in_lockstep = loop.ranks if loop.shard.gathers_weights else None
        self._padding, self._terms = PaddingCheck(), TermsCheck()
        self._clock = Clock(self._layout.device)
        needs, offload = self._requirements.needs, self._requirements.offload
        self._reduction = FoldReduction(loop.shard)
        if not needs:
            return
        self._rows = GradientRows(self._reduction, offload, self._requirements.rows_dtype)
        if loop.ranks.number == 0:
            plan, missing = announcement(loop, self._requirements)
            logger.info(plan)
            for line in missing:
                logger.warning(line)
        if Need.ENTROPY_GRADIENT in needs:
            self._memory = StepMemory(loop.shard, self._requirements.entropy, offload)
            self._memory.load_state_dict(self._memory_state)
            self._guard = StepGuard(loop.shard, self._memory, loop.ranks.reduce)

    def refuse_impossible_folds(self, shape: Shape) -> None:
        """Raises ValueError, naming a number that would do, where the steps of a training cannot have these folds."""
        self._requirements.folds(shape, shape.sizes)

    # --- the five calls, in the order of a step -----------------------------------------------------------------------

    def begin(self, number: int, sizes: Sequence[int] | None = None) -> None:
        """Begins optimizer step `number`, counted from 1. A collective where it is measured and has sizes of its own.

        sizes  sequences of each of its microbatches on this rank; None: as in the loop's `shape`
        """
        probes = [probe for probe in self.probes if probe.measures_at(number)]
        if not probes:
            self.open_step = OpenStep(number, probes)
            return
        of_ranks = None
        if sizes is not None:  # other processes may have others, whose prompts end elsewhere
            own = torch.tensor(sizes, dtype=torch.float64, device=self._layout.device)
            of_ranks = self._loop.ranks.gather(own).long().tolist()
        sizes = self._loop.shape.sizes if sizes is None else sizes
        folds = self._requirements.folds(self._loop.shape, sizes, of_ranks)
        refuse_other_parameters(self._loop.shard)
        if self._guard is not None:
            self._guard.notice_edits()
        if self._rows is not None:
            needs, shard, roots = needs_of(probes), self._loop.shard, None
            if Need.SQ_NORMS in needs:
                roots = adam_roots(self._layout, shard.weights(), view_optimizer(shard).states)
            is_sliced = len(folds) > len(sizes)  # norms of slices take their rows
            self._rows.start_step(folds, Need.FOLD_GRADIENTS in needs or (is_sliced and roots is not None), roots)
        self.open_step = OpenStep(number, probes, folds, self._requirements.num_folds)

    def microbatch(self, rollout: Rollout, scores: Scores, loss: MadeLoss, seen: Scores | None = None) -> None:
        """Takes a microbatch whose forward pass is done, and watches its backward.

        scores  that the loss is made of, with graph
        seen    kept instead of these scores: also covers tokens that the loss masks out
        """
        step = self.open_step
        assert step is not None, "call begin(number) first"
        self.disarm()
        step.rollouts.append(rollout)
        step.scores.append((seen or scores).detached())
        step.loss_settings = loss.settings or self._loop.loss_settings
        if step.probes:
            step.other_terms |= loss.has_other_terms(scores, self._loop.shard.leaves.values())
            step.watch_loss(scores)
            if self._rows is not None:
                self._rows.arm(step.microbatch_rows[-1].start)

    def gradients_ready(self, rollout_number: int) -> None:
        """Runs the probes just before the optimizer's step. A collective where the step is measured.

        rollout_number  number of the rollout that the step learns from, within this training
        """
        step = self.open_step
        assert step is not None
        self.disarm()
        if rollout_number != self._rollout_number:
            self._rollout_number, self._learned = rollout_number, set()
        step.is_ready = True
        if step.probes:
            with self._aside():
                self._prepare(step)
        if step.rollouts:  # also where this step is not measured: a later one on them may be
            self._learned.update(torch.cat([rollout.prompt_index for rollout in step.rollouts]).tolist())

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A context of the probes' own calculations: a loop may be in one of autocast, and a probe may draw."""
        device = self._layout.device
        tables = tables_put_back(self._loop.policy.model)
        with streams_put_back(device), tables, torch.autocast(device.type, enabled=False):
            yield

    def _prepare(self, step: OpenStep) -> None:
        view, asking = self._view(step), predicting(step.probes)
        if self._memory is not None and asking:
            with self._clock.timed(asking[0].name):
                change = measure_entropy_change(view, self._memory, needs_of(asking))
            view = view.with_entropy_change(change)
        step.view = view
        if self._guard is not None:
            self._guard.ready(view, step.probes)
        for probe in step.probes:
            with self._clock.timed(probe.name):
                probe.prepare(view)
        reshard(self._loop.policy.model)  # a probe may have scored with a graph and gone no further

    def stepped(self) -> None:
        """Runs the probes just after the optimizer's step. A collective where the step is measured."""
        step = self.open_step
        if step is None or step.view is None:
            return
        if self._memory is not None:
            self._memory.finish(step.number, self._loop.shard.weights())
        with self._aside():
            for probe in step.probes:
                with self._clock.timed(probe.name):
                    probe.after_step(step.view)
            if self._guard is not None:
                step.check = self._guard.stepped()

    def abandon(self) -> None:
        """Discards the step that has begun; called instead of `gradients_ready` when the loop skips the step."""
        self.open_step = None
        if self._rows is not None:
            self._rows.release()

    def finish(self) -> dict[str, dict[str, Estimate]]:
        """Returns the estimates of each probe that measured the step, by its name; nothing when none did."""
        step, self.open_step = self.open_step, None
        if step is None or step.view is None:
            return {}
        answers = {}
        for probe in step.probes:
            with self._clock.timed(probe.name):
                answers[probe.name] = probe.checked_results(step.number)
        if step.check:
            answers[predicting(step.probes)[0].name] |= step.check
        return answers

    # --- costs, state, end --------------------------------------------------------------------------------------------

    def costs(self, step_seconds: float) -> dict[str, float]:
        """Returns each probe's seconds at the last measured step, fraction_of_step, all of them, and buffer_bytes.

        Call it after `finish`; it frees the step's gradient rows.
        """
        seconds = self._clock.read()
        buffers = 0 if self._memory is None else self._memory.num_bytes
        if self._rows is not None:
            buffers += self._rows.num_bytes
            self._rows.release()
        shared = {"fraction_of_step": sum(seconds.values()) / step_seconds, "buffer_bytes": float(buffers)}
        return {f"{name}_seconds": spent for name, spent in seconds.items()} | shared

    def close(self) -> None:
        """Removes every hook and frees all vectors: training has ended, perhaps in the middle of a step."""
        self._memory_state, self._memory = self.state_dict(), None
        if self._rows is not None:
            self._rows.release()
        self.open_step = self._rows = self._guard = None

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what a resumed run needs beside the probes' own states: the last update, and errors."""
        return dict(self._memory_state) if self._memory is None else self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` returned."""
        self._memory_state = state
        if self._memory is not None:
            self._memory.load_state_dict(state)

    # --- a step's view ------------------------------------------------------------------------------------------------

    def _view(self, step: OpenStep) -> Step:
        """Returns what probes see of a step whose gradients are all in. A collective."""
        loop, reduce, rollout = self._loop, self._loop.ranks.reduce, join_rollouts(step.rollouts)
        edited = "" if self._guard is None else self._guard.why_edited()
        padded = self._padding.why_it_matters(rollout, loop.policy, reduce)
        own = loop.sampling_mismatch if rollout.sampling_mismatch is None else rollout.sampling_mismatch
        capabilities = step.capabilities(loop, self._learned, own or edited or padded)
        folds, fold = step.place_in_folds(loop, rollout, mixed=bool(capabilities.mixed_prompts))
        batch = step.join(loop, rollout, fold, folds[-1].folds.stop)
        mean, optimizer = gradients_and_states(loop.shard, view_optimizer(loop.shard))
        why_no_rows = capabilities.mixed_prompts or self._terms.why_no_slices(step.folds, batch, capabilities)
        ones = torch.ones(rollout.num_sequences, dtype=torch.float64, device=batch.fold.device)
        view = Step(
            number=step.number,
            batch=batch,
            gradients=Gradients(loop.shard.weights(), mean, self._layout, self._reduction, None, why_no_rows),
            optimizer=optimizer,
            policy=loop.policy,
            ranks=loop.ranks,
            folds=folds,
            fold_sizes=reduce(batch.sum_by_fold(ones)).cpu(),
            capabilities=capabilities,
        )  # fmt: skip
        return self._with_rows(view, step.probes)

    def _with_rows(self, view: Step, probes: Sequence[Probe]) -> Step:
        """Returns what probes see of a step, with the gradients of its folds where one needs them. A collective."""
        asking = [probe for probe in probes if probe.needs & (Need.FOLD_GRADIENTS | Need.SQ_NORMS)]
        if self._rows is None or not asking or view.gradients.why_no_rows:
            return view
        with self._clock.timed(asking[0].name):
            if len(view.folds) > len(view.batch.microbatch_rows):
                self._rows.fill_slices(view)
            mean = self._layout.vector(view.gradients.mean.values())
            squares = self._rows.finish(view.fold_sizes, view.ranks.count, mean)
            sq_norms = None if self._rows.sq_norms is None else view.ranks.reduce(self._rows.sq_norms)
            if sq_norms is not None and view.optimizer.states is not None:  # nothing in any metric, cold or warm
                sq_norms[:, [not state.moves for state in view.optimizer.states.values()], 1] = 0.0
            tensors = [*self._loop.shard.leaves.values(), *(self._rows.rows or ())]
            is_rounded = any(tensor.dtype.itemsize < 4 for tensor in tensors)
            squares = view.ranks.reduce(squares)
            why_not = why_not_the_sum(squares, is_rounded)
            gradients = dataclasses.replace(
                view.gradients, rows=self._rows.rows, sq_norms=sq_norms, why_no_rows=why_not
            )
            view = dataclasses.replace(view, gradients=gradients)
            return self._terms.checked(view, squares[3:], asked=Need.LOSS_CHECK in needs_of(probes))

    def disarm(self) -> None:
        """Removes the hooks before the next call: the loop's backward is over."""
        if self._rows is not None:
            self._rows.disarm()
