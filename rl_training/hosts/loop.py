"""Probes on a loop in plain PyTorch. `measured_loop` documents the calls; examples/plain_loop.py is a whole loop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rl_training.engine.driver import StepDriver
from rl_training.engine.kl_bound import KLBound
from rl_training.engine.loop import Loop
from rl_training.engine.loss_check import LossInfo
from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.hosts import loop_refusals
from rl_training.hosts.estimate_writer import EstimateWriter, as_records
from rl_training.hosts.interrupt_note import note_interrupt
from rl_training.hosts.loop_claim import LoopClaim
from rl_training.hosts.loop_policy import NO_SAMPLE, LoopPolicy, Sample
from rl_training.hosts.loop_progress import LoopProgress, Phase
from rl_training.hosts.probes import as_probes
from rl_training.hosts.recorded_settings import settings_of_loop
from rl_training.hosts.step_warnings import StepWarnings
from rl_training.options import named_arguments
from rl_training.parallel.fsdp import FullyShard
from rl_training.parallel.ranks import all_ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.rollout import Rollout, with_one_advantage_each
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.records.jsonl import Records
from rl_training.statistics.estimate import Estimate
from rl_training.step.reasons import Fixes, Reasons, reason_of_loop

logger = logging.getLogger(__name__)

DR_GRPO_FIX = "measured_loop(dr_grpo=True) says that the loss is Dr-GRPO's alone"
FIXES = Fixes(
    batch_setting="measured_loop(microbatch_size={size}, microbatches={count})",
    steps_setting="measured_loop(microbatches={count})",
    num_folds_setting="{probe}(num_folds={folds})",
)
LEFT_OUT = "step {number} has no optimizer.step(), so it is left out: call measured.skip_step() if that is intended"


@named_arguments
def measured_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    probes: Sequence[Probe | str] | Probe | str,
    *,
    responses_per_prompt: int,
    microbatch_size: int,
    microbatches: int,
    max_grad_norm: float | None = None,
    records: Records | str | Path | None = None,
    temperature: float = 1.0,
    dr_grpo: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]] | None = None,
    sample: Sample | None = None,
    decode: Callable[[Tensor], str] | None = None,
    sampling_mismatch: str = "",
    target_kl_share: float | str | None = None,
) -> MeasuredLoop:
    """Return a context in which probes measure a training loop in plain PyTorch: one process, DDP or FSDP2.

        with measured_loop(model, optimizer, probes, …) as measured:
            for number in range(1, steps + 1):
                with measured.step(number) as metrics:
                    for part in microbatches:
                        logps, entropies = …                     # from your own forward pass
                        measured.microbatch(part, logps, entropies)
                        …                                        # compute the loss from these logps; backward
                    measured.gradients_ready()                   # before the gradient is clipped
                    …                                            # clip, optimizer.step(), optimizer.zero_grad()

    When a step ends, `metrics` holds what was measured, and the same line is written to the records. To leave a step
    out (because of a gradient spike, for example), call `measured.skip_step()` instead of `optimizer.step()`.

    `backward` sums the gradients of a step's microbatches: divide the loss by their number, as for one large batch.

    Args:
        model: A Hugging Face causal language model, DDP around one, or one sharded by `fully_shard`.
        optimizer: A torch optimizer, or accelerate's wrapper of one. No GradScaler: train in bf16 or fp32.
        probes: What to measure: probe objects, or names such as "simple".
        responses_per_prompt: Responses that each prompt of a step has.
        microbatch_size: Sequences of one forward and backward on this rank, the same in all microbatches.
        microbatches: Microbatches of one optimizer step on this rank.
        max_grad_norm: The threshold of the loop's own `clip_grad_norm_`. None if it does not clip.
        records: Where rank 0 writes metrics.jsonl and probes.jsonl: a folder or `Records`. None writes nothing. Where
            another training lies, the next free number, my_run-2/logs. A loop that resumes continues in its own.
        temperature: The sampling temperature, by which the loop divides the logits.
        dr_grpo: Whether the loss is meant to be Dr-GRPO's: −A log π summed over all tokens, divided by a constant.
            Probes read the loss's actual weights; where these differ from Dr-GRPO's, the reason names this setting.
        autocast: Returns a new autocast context for the loop's forward pass. None for no autocast.
        sample: `sample(n)` returns n fresh responses, each to a random prompt. torch is seeded before, and its random
            state restored after. Under FSDP2 a call runs equally many passes on all ranks. None: no fresh ones.
        decode: Returns the text of a tensor of token ids. If None, the ids themselves are recorded.
        sampling_mismatch: Why the responses are not samples of the policy (top-p, say): most estimates are then nan.
        target_kl_share: The KL divergence of each step as a share of the policy's entropy: "auto", which is 1e-2, or a
            number. The learning rate of each step is set to meet it. None keeps the loop's rate. No other setting
            changes training.

    Raises:
        UserError: With what to change, if probes would corrupt training or cannot measure it.
    """
    probes = as_probes(probes)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    loop_refusals.refuse_scaled_optimizer(optimizer)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    counts = {"responses_per_prompt": responses_per_prompt, "microbatch_size": microbatch_size}
    loop_refusals.refuse_impossible_settings({**counts, "microbatches": microbatches}, temperature, max_grad_norm)
    loop_refusals.refuse_what_cannot_be_measured(model, module, optimizer)
    is_sharded = isinstance(module, FSDPModule)
    scorer = Scorer(module, temperature, autocast=autocast or contextlib.nullcontext, run_inside_forward=is_sharded)
    loop = Loop(
        responses_per_prompt=responses_per_prompt,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        shard=(FullyShard if is_sharded else Shard)(module, optimizer, max_grad_norm),
        policy=LoopPolicy(module, scorer, microbatch_size, sample, decode),
        ranks=all_ranks(),
        reasons=Reasons(
            sampling_mismatch=reason_of_loop(sampling_mismatch),
            no_fresh_responses=None if sample is not None else NO_SAMPLE,
        ),
        fixes=dataclasses.replace(FIXES, dr_grpo=DR_GRPO_FIX if dr_grpo else ""),
    )
    return MeasuredLoop(probes, loop, records, None if target_kl_share is None else KLBound(target_kl_share))


class MeasuredLoop:
    """Probes on a plain loop, from the start to the end of its `with` block. Made by `measured_loop`."""

    def __init__(self, probes: Sequence[Probe], loop: Loop, records: Any, bound: KLBound | None = None) -> None:
        self._driver = StepDriver(probes, bound)
        self._loop, self._policy = loop, loop.policy
        self._driver.refuse_impossible_folds(sum(loop.sizes), loop.responses_per_prompt, loop.ranks.count)
        self._writer = EstimateWriter(self._driver.probes, as_records(records), loop.policy.decode)
        self._warnings = StepWarnings()
        self._claim = LoopClaim(self._writer.records)
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
        self._warnings.begin()
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
            rollout_number: The rollout that it learns from, if several steps share one. None: a rollout of its own.

        Yields:
            The step's line of metrics.jsonl. Add what the loop knows (loss, grad_norm); the rest is added at the end.
        """
        self._progress.require(
            Phase.BETWEEN_STEPS, "begin step(...) inside `with measured_loop(...)`, after the previous step has ended"
        )
        progress = self._progress.after_begin(number, rollout_number)
        self._claim.take(number, next(self._policy.model.parameters()).device)
        if self._progress.last_step_number is None and self._writer.records is not None:
            self._writer.records.start(after_step=number - 1, settings=settings_of_loop(self._loop))
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
            self._driver.fail_step()
            raise
        finally:
            self._progress = self._progress.in_phase(Phase.BETWEEN_STEPS)

    def _finish_step(self, number: int) -> None:
        result = self._driver.finish()
        self._warnings.warn(number, result)
        self._writer.write(number, result)
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
        loop_refusals.refuse_missing_backward(self._driver)
        loop_refusals.refuse_other_shapes(rollout, logps, entropies, self._loop.microbatch_size)
        loop_refusals.refuse_one_more_microbatch(self._driver, self._loop.microbatches)
        if rollout.on_policy and self._progress.is_rollout_reused:
            raise UserError("an earlier step has trained on this rollout: give it on_policy=False, sampling_logps=...")
        needs_scores = self._driver.needs_scores
        if needs_scores and not self._has_checked_scores:
            loop_refusals.refuse_other_scores(rollout, logps, entropies, self._policy)
            self._has_checked_scores = True
        if entropies is None:
            entropies = torch.full_like(logps, torch.nan)
            if needs_scores:
                with self._driver.costs.timed():
                    entropies = self._policy.score_rollout(rollout, as_training=True, dropout=True).entropies
        scores = Scores(logps, entropies, rollout.completion_mask)
        self._driver.microbatch(rollout, scores, LossInfo(other_terms=other_terms))

    def gradients_ready(self) -> None:
        """Run the probes. Call after the last backward, when gradients are averaged over ranks and not yet clipped."""
        self._progress.require(Phase.IN_MICROBATCHES, "call gradients_ready() once in a step, after its microbatches")
        loop_refusals.refuse_missing_microbatches(self._driver, self._loop.microbatches)
        loop_refusals.refuse_missing_backward(self._driver)
        self._driver.gradients_ready(self._progress.rollout_number)
        self._metrics["learning_rate"] = float(self._loop.shard.optimizer.param_groups[0]["lr"])
        self._progress = self._progress.in_phase(Phase.GRADIENTS_READY)

    def skip_step(self) -> None:
        """Leave this step out. Call it anywhere within the step, instead of `optimizer.step()`.

        The step keeps its number and what was measured on its responses. It has no predictions.
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
        loop_refusals.refuse_grad_scaler()
        self._driver.about_to_step()

    def _after_optimizer(self, *args: Any) -> None:
        if self._progress.phase == Phase.GRADIENTS_READY:
            self._driver.stepped()
            self._progress = self._progress.in_phase(Phase.STEPPED)

    # --- the state of a checkpoint ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the probes' states by name, and the records' id, for `torch.save`: save them along with the model."""
        return self._claim.state(self._driver.states() if self._states is None else self._states)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `state_dict` returned, before `with`. Raise UserError if it belongs to other probes."""
        self._progress.require(Phase.OUTSIDE, "call load_state_dict(...) before `with measured_loop(...)`")
        self._states = self._claim.load(state, self._driver.initial_states())
