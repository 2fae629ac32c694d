"""The calls of a loop in plain PyTorch: each is checked, and reported to the engine's driver."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rl_training.engine.driver import StepDriver
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.loss_info import LossInfo
from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter, as_records
from rl_training.hosts.folder_claim import FolderClaim
from rl_training.hosts.interrupt_note import note_interrupt
from rl_training.hosts.plain import refusals
from rl_training.hosts.plain.checkpoint import as_state, from_state
from rl_training.hosts.plain.progress import LoopProgress, Phase
from rl_training.hosts.recorded_settings import settings_of_loop
from rl_training.policy.rollout import Rollout, with_one_advantage_each
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate

logger = logging.getLogger(__name__)

LEFT_OUT = "step {number} has no optimizer.step(), so it is left out: call measured.skip_step() if that is intended"


class MeasuredLoop:
    """Probes on a plain loop, from the start to the end of its `with` block. Made by `measured_loop`."""

    def __init__(
        self, probes: Sequence[Probe], loop: LoopSpec, records: Any, target_kl_share: float | str | None = None
    ) -> None:
        self._driver = StepDriver(probes, target_kl_share)
        self._loop = loop
        self._policy = loop.policy
        self._driver.refuse_impossible_folds(sum(loop.sizes), loop.responses_per_prompt, loop.ranks.count)
        self._writer = EstimateWriter(self._driver, as_records(records), loop.policy.decode)
        self._claim = FolderClaim(self._writer.records)
        self._undo = contextlib.ExitStack()
        self._progress = LoopProgress()
        self._states: Mapping[str, Any] | None = None  # states for the next `with`; None starts from scratch
        self._initial_states: Mapping[str, Any] | None = None  # states that the open `with` started from
        self._has_checked_scores = False
        self._metrics: dict[str, Any] = {}  # line of the open step

    @property
    def scorer(self) -> Scorer:
        """The probes' scorer. The loop may use it for its own forward pass on one process, but not under DDP."""
        return self._policy.scorer

    @property
    def latest(self) -> Mapping[str, Estimate]:
        """The probes' latest estimates, by name."""
        return self._writer.latest

    def __enter__(self) -> MeasuredLoop:
        self._progress.require(Phase.OUTSIDE, "enter measured_loop once per training")
        self._driver.start(self._loop, self._states)
        self._initial_states, self._states = self._states, None
        self._undo.callback(self._claim.release)
        self._undo.callback(self._driver.close)
        optimizer = self._loop.shard.optimizer
        self._undo.callback(optimizer.register_step_pre_hook(self._before_optimizer).remove)
        self._undo.callback(optimizer.register_step_post_hook(self._after_optimizer).remove)
        self._progress = self._progress.in_phase(Phase.BETWEEN_STEPS)
        self._writer.begin_training(self._writer.records)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._progress = self._progress.in_phase(Phase.OUTSIDE)
        note_interrupt(error, self._writer.records)
        try:
            with self._undo:
                if error is None:  # an error may have occurred on this rank alone, and `end` is collective
                    self._driver.end()
        finally:
            # If no step has ended, keep the states from before: the next `with` repeats the first step.
            self._states = self._initial_states if self._progress.last_step_number is None else self._driver.states()
            self._initial_states = None

    # --- a step -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, number: int, rollout_number: int | None = None) -> Iterator[dict[str, Any]]:
        """Measure one optimizer step: open before its microbatches, close after `optimizer.step()`.

        Args:
            number: The step's number, consecutive and counted from 1.
            rollout_number: The rollout that it learns from, if several steps share one, in a row or not: the latest 256
                are remembered. None: a rollout of its own.

        Yields:
            The step's line of metrics.jsonl. Add what the loop knows (loss, grad_norm); the rest is added at the end.
            A reward or entropy that you add stays as it is.

        Raises:
            UserError: If the step cannot begin now, or if you added a number under the name of an estimate.
        """
        self._progress.require(
            Phase.BETWEEN_STEPS, "begin step(...) inside `with measured_loop(...)`, after the previous step has ended"
        )
        progress = self._progress.after_begin(number, rollout_number)
        self._claim.take(number, next(self._policy.model.parameters()).device)
        if self._progress.last_step_number is None and self._writer.records is not None:
            settings = settings_of_loop(self._loop, self._driver.kl_share)
            self._writer.records.start(after_step=number - 1, settings=settings)
        self._progress = progress
        self._metrics = {}
        try:
            self._driver.begin(number)
            self._driver.plan()
            yield self._metrics
            is_left_out = self._progress.phase in (Phase.IN_MICROBATCHES, Phase.GRADIENTS_READY)
            if is_left_out:
                logger.warning(LEFT_OUT.format(number=number))
                self.skip_step()
            self._progress = self._progress.after_end(is_left_out)
            self._finish_step(number)
        except BaseException:
            if self._progress.phase in (Phase.STEPPED, Phase.SKIPPED):  # what failed came after the step itself
                self._progress = self._progress.after_end(was_left_out=False)
            self._driver.fail_step()
            raise
        finally:
            self._progress = self._progress.in_phase(Phase.BETWEEN_STEPS)

    def _finish_step(self, number: int) -> None:
        result = self._writer.finish(number)
        self._metrics |= self._writer.write_line(number, self._metrics, result)

    def microbatch(
        self, rollout: Rollout, logps: Tensor, entropies: Tensor | None = None, *, other_terms: bool = False
    ) -> None:
        """Register a microbatch after its forward pass. Call its backward next, then register the next microbatch.

        Args:
            rollout: The sequences. Give `sampling_logps` if another engine or older weights sampled them.
            logps: Log-probabilities of the completion tokens, (B, T), in nats: the very tensor, with graph, that the
                loss is computed from.
            entropies: Entropies of the next-token distributions, (B, T), in nats, with graph if the loss uses them.
                If None, the scorer computes them at measured steps in one more forward pass, without graph.
            other_terms: Whether the loss has terms computed from neither (KL penalty on logits, load balancing).
        """
        self._progress.require(
            Phase.IN_MICROBATCHES, "call microbatch(...) inside `with measured.step(number):`, before gradients_ready()"
        )
        rollout = with_one_advantage_each(rollout)
        refusals.refuse_missing_backward(self._driver)
        refusals.refuse_other_shapes(rollout, logps, entropies, self._loop.microbatch_size)
        refusals.refuse_one_more_microbatch(self._driver, self._loop.microbatches)
        if rollout.on_policy and self._driver.seen_prompts.of_rollout(self._progress.rollout_number):
            raise UserError("an earlier step has trained on this rollout: give it on_policy=False, sampling_logps=...")
        needs_scores = self._driver.needs_scores
        if needs_scores and not self._has_checked_scores:
            refusals.refuse_other_scores(rollout, logps, entropies, self._policy)
            self._has_checked_scores = True
        if entropies is None:
            entropies = Scores.unknown(rollout.completion_mask).entropies
            if needs_scores:
                with self._driver.costs.timed():
                    entropies = self._policy.score_rollout(rollout, as_training=True, dropout=True).entropies
        scores = Scores(logps, entropies, rollout.completion_mask)
        self._driver.microbatch(rollout, scores, LossInfo(other_terms=other_terms))

    def gradients_ready(self) -> None:
        """Run the probes. Call after the last backward, when gradients are averaged over ranks and not yet clipped."""
        self._progress.require(Phase.IN_MICROBATCHES, "call gradients_ready() once in a step, after its microbatches")
        refusals.refuse_missing_microbatches(self._driver, self._loop.microbatches)
        refusals.refuse_missing_backward(self._driver)
        # Read before target_kl_share changes it, as TRL logs it: the rate of the loop's schedule.
        self._metrics["learning_rate"] = float(self._loop.shard.optimizer.param_groups[0]["lr"])
        self._driver.gradients_ready(self._progress.rollout_number)
        self._progress = self._progress.in_phase(Phase.GRADIENTS_READY)

    def skip_step(self) -> None:
        """Leave this step out. Call it anywhere within the step, instead of `optimizer.step()`.

        The step keeps its number and has no predictions. What was measured on its responses is kept after
        `gradients_ready()`; before, its line has only its time and the loop's own numbers.
        """
        if self._progress.phase == Phase.GRADIENTS_READY:
            self._driver.stepped(was_taken=False)
        else:
            what = "call skip_step() inside `with measured.step(number):`, instead of optimizer.step()"
            self._progress.require(Phase.IN_MICROBATCHES, what)
            self._driver.skip_step()
        self._progress = self._progress.in_phase(Phase.SKIPPED)

    def _before_optimizer(self, *args: Any) -> None:
        if self._progress.phase == Phase.BETWEEN_STEPS and not self._progress.was_left_out:
            return
        what = "call optimizer.step() once in a step, after gradients_ready() and before the step's context ends"
        self._progress.require(Phase.GRADIENTS_READY, what)
        refusals.refuse_grad_scaler()
        self._driver.about_to_step()

    def _after_optimizer(self, *args: Any) -> None:
        if self._progress.phase == Phase.GRADIENTS_READY:
            self._progress = self._progress.in_phase(Phase.STEPPED)  # the weights have moved, whatever fails below
            self._driver.stepped()

    # --- the state of a checkpoint ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the probes' states by name, and the records' id, for `torch.save`: save them along with the model."""
        return as_state(self._driver.states() if self._states is None else self._states, self._claim.run_id)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `state_dict` returned, before `with`: the next step is the one after it.

        A loop that has trained further goes back. UserError if the state belongs to other probes.
        """
        self._progress.require(Phase.OUTSIDE, "call load_state_dict(...) before `with measured_loop(...)`")
        self._states, run_id = from_state(state, self._driver.initial_states())
        self._claim.resume(run_id)
        self._progress = LoopProgress()
