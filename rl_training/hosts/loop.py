"""Probes on a training loop in plain PyTorch: one process, DDP or FSDP2. Three calls in a step:

    with measured_loop(model, optimizer, probes, …) as measured:
        for number in range(1, steps + 1):
            with measured.step(number) as metrics:
                for part in microbatches:
                    logps, entropies = …                        # of your own forward pass
                    measured.microbatch(part, logps, entropies)
                    …                                           # a loss made of these very logps, and its backward
                measured.gradients_ready()                      # before the gradient is clipped
                …                                               # clip, optimizer.step(), optimizer.zero_grad()

At the end of a step `metrics` has what was measured, and logs/ has a line of it. Where a step is left out (its gradient
is a spike), measured.skip_step() stands in the place of optimizer.step(). A whole loop: examples/plain_loop.py.

`backward` adds up the gradients of a step's microbatches: divide the loss by their number, as for one large batch.
All microbatches have the same size. GradScaler is not supported: train in bf16 or fp32.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rl_training.engine.bounded_driver import BoundedDriver
from rl_training.engine.driver import StepDriver
from rl_training.engine.kl_bound import KLBound
from rl_training.engine.loop_spec import LoopSpec, StepShape
from rl_training.engine.loss_check import MadeLoss
from rl_training.engine.probe import Probe
from rl_training.engine.recorder import StepRecorder
from rl_training.errors import UserError
from rl_training.hosts import loop_refusals
from rl_training.hosts.described import settings_of_loop
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.loop_life import BATCHES, BETWEEN, OUTSIDE, READY, SKIPPED, STEPPED, LoopLife
from rl_training.hosts.loop_policy import NO_SAMPLE, LoopPolicy, Sample
from rl_training.parallel.fsdp import FullyShard
from rl_training.parallel.ranks import all_ranks
from rl_training.parallel.sharding import Shard
from rl_training.parallel.state_tensors import from_tensors, tensors_by_name
from rl_training.policy.rollout import Rollout, with_one_advantage_each
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.records.jsonl import Records
from rl_training.statistics.estimate import Estimate
from rl_training.step import limits
from rl_training.step.limits import Fixes, Limits

logger = logging.getLogger(__name__)

SAYS_DR_GRPO = "measured_loop(dr_grpo=True) says that the loss is Dr-GRPO's alone"
LEFT_OUT = "step {number} has no optimizer.step(), so it is left out: say measured.skip_step() where that is meant"


def measured_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    probes: Sequence[Probe] | Probe,
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
    target_kl_share: float | None = None,
) -> MeasuredLoop:
    """Return the context in which these probes measure a training loop. See the module's docstring.

    model                 a causal language model of Hugging Face's, DDP around one, or one cut by fully_shard
    optimizer             torch's, or accelerate's around it
    microbatch_size       sequences of one forward and backward on this process, `microbatches` of them to a step
    max_grad_norm         where the loop clips the gradient with clip_grad_norm_; None where it does not
    records               where metrics.jsonl and probes.jsonl are written, by rank 0: Records, or a folder
    temperature           of sampling, by which the loop divides logits
    dr_grpo               the loss is meant to be Dr-GRPO's: −A log π summed over all tokens, divided by a constant. Its
                          weights say what it is; where they differ, the reason names this setting
    autocast              the autocast context of the loop's forward pass, made anew by each call
    sample                sample(n) returns n fresh responses, one each to random prompts; torch is seeded before
                          the call and restored after it. None: what needs fresh responses is nan
    decode                the text of a sequence of token ids; None: the ids themselves are recorded
    sampling_mismatch     why the responses are not samples of the policy (e.g. top-p): most estimates are then nan
    target_kl_share       sets the learning rate of each step such that its KL is this share of the policy's entropy,
                          2e-3 say; None: the loop's rate. The one setting that changes training

    Raises ValueError, saying what to change, where probes would corrupt the training or cannot measure it.
    """
    module = model.module if isinstance(model, DistributedDataParallel) else model
    loop_refusals.refuse_scaled_optimizer(optimizer)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    shape = StepShape(responses_per_prompt, microbatch_size, microbatches, all_ranks().count)
    loop_refusals.refuse_impossible_settings(shape, temperature, max_grad_norm)
    loop_refusals.refuse_what_cannot_be_measured(probes, model, module, optimizer)
    is_sharded = isinstance(module, FSDPModule)
    scorer = Scorer(module, temperature, autocast=autocast or contextlib.nullcontext, run_inside_forward=is_sharded)
    loop = LoopSpec(
        shape=shape,
        shard=(FullyShard if is_sharded else Shard)(module, optimizer, max_grad_norm),
        policy=LoopPolicy(module, scorer, microbatch_size, sample, decode),
        ranks=all_ranks(),
        limits=Limits(
            sampling_mismatch=limits.sampling_mismatch(sampling_mismatch),
            no_fresh_responses=None if sample is not None else NO_SAMPLE,
        ),
        fixes=Fixes(dr_grpo=SAYS_DR_GRPO if dr_grpo else ""),
    )
    return MeasuredLoop(probes, loop, records, None if target_kl_share is None else KLBound(target_kl_share))


class MeasuredLoop:
    """Probes on a plain loop, until the end of its context. Made by `measured_loop`."""

    def __init__(self, probes: Any, loop: LoopSpec, records: Any, bound: KLBound | None = None) -> None:
        probes = loop_refusals.probes_in(probes)
        self._driver, self._bound = BoundedDriver(probes, bound) if bound else StepDriver(probes), bound
        self._loop, self._policy = loop, loop.policy
        self._driver.refuse_impossible_folds(loop.shape)
        self._writer = EstimateWriter(self._driver, records, loop.policy.decode)
        self._undo = contextlib.ExitStack()
        self._life = LoopLife()
        self._states: Mapping[str, Any] | None = None  # that the next `with` goes on from; None: it begins anew
        self._begun_with: Mapping[str, Any] | None = None  # the same, of the `with` that is open
        self._scores_checked = False
        self._metrics: dict[str, Any] = {}  # of the open step

    @property
    def scorer(self) -> Scorer:
        """The probes' scorer. On one process the loop's forward pass may use it too; under DDP it must use DDP's."""
        return self._policy.scorer

    @property
    def latest(self) -> Mapping[str, Estimate]:
        """The probes' latest estimates, by name."""
        return self._writer.latest

    def __enter__(self) -> MeasuredLoop:
        self._life.expect(OUTSIDE, "enter measured_loop once per training")
        self._driver.start(self._loop, self._states)
        self._begun_with, self._states = self._states, None
        self._undo.callback(self._driver.close)
        optimizer = self._loop.shard.optimizer
        self._undo.callback(optimizer.register_step_pre_hook(self._before_optimizer).remove)
        self._undo.callback(optimizer.register_step_post_hook(self._after_optimizer).remove)
        self._life = self._life.at(BETWEEN)
        self._writer.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._life = self._life.at(OUTSIDE)
        self._writer.note_interrupt(error)
        if error is None:  # else perhaps on this process alone
            self._driver.end()
        self._undo.close()
        # Of a training that has not ended a step nothing is kept: the next `with` takes its first step again.
        self._states = self._begun_with if self._life.number is None else self._driver.states()
        self._begun_with = None

    # --- a step -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, number: int, rollout_number: int | None = None) -> Iterator[dict[str, Any]]:
        """A context around optimizer step `number` (from 1), from before its microbatches to after optimizer.step().

        Yields the line of metrics.jsonl. The loop adds what it knows (loss, grad_norm); the rest is added at the end.

        rollout_number  which rollout the step learns from, where several steps learn from one; None: from its own
        """
        self._life.expect(
            BETWEEN, "begin step(...) inside `with measured_loop(...)`, after the previous step has ended"
        )
        begun = self._life.begun(number, rollout_number)
        if self._life.number is None and self._writer.records is not None:
            self._writer.records.start(after_step=number - 1, settings=settings_of_loop(self._loop))
        self._life = begun
        self._metrics = {}
        try:
            self._driver.begin(number)
            self._driver.plan()
            yield self._metrics
            is_left_out = self._life.place in (BATCHES, READY)
            if is_left_out:
                logger.warning(LEFT_OUT.format(number=number))
                self.skip_step()
            self._life = self._life.ended(is_left_out)
            self._writer.write_step(number, self._metrics)
        except BaseException:
            self._driver.fail_step()
            raise
        finally:
            self._life = self._life.at(BETWEEN)

    def microbatch(
        self, rollout: Rollout, logps: Tensor, entropies: Tensor | None = None, *, other_terms: bool = False
    ) -> None:
        """Take a microbatch whose forward pass is done; call its backward next, and then the next microbatch.

        rollout      with sampling_logps where another engine, or older weights, have sampled it
        logps        (B, T) with graph: the very tensor that the loss is made of
        entropies    (B, T) of the next-token distributions, with graph if the loss uses them. None: at measured steps
                     the scorer computes them in one more forward pass, without graph
        other_terms  the loss has terms computed from neither (a KL penalty on logits, a load balancing loss)
        """
        self._life.expect(
            BATCHES, "call microbatch(...) inside `with measured.step(number):`, before gradients_ready()"
        )
        rollout = with_one_advantage_each(rollout)
        step = self._step()
        loop_refusals.refuse_missing_backward(step)
        loop_refusals.refuse_other_shapes(rollout, logps, entropies, self._loop.shape.microbatch_size)
        loop_refusals.refuse_one_more_microbatch(step, self._loop.shape)
        if rollout.on_policy and self._life.learns_again:
            raise UserError("an earlier step has trained on this rollout: give it on_policy=False, sampling_logps=...")
        if (step.probes or self._bound) and not self._scores_checked:
            loop_refusals.refuse_other_scores(rollout, logps, entropies, self._policy)
            self._scores_checked = True
        if entropies is None:
            entropies = torch.full_like(logps, torch.nan)
            if step.probes or self._bound:
                with self._driver.measuring():
                    entropies = self._policy.score_rollout(rollout, as_training=True, dropout=True).entropies
        scores = Scores(logps, entropies, rollout.completion_mask)
        self._driver.microbatch(rollout, scores, MadeLoss(other_terms=other_terms))

    def gradients_ready(self) -> None:
        """Call after the last backward, when gradients are averaged over processes and not clipped yet."""
        self._life.expect(BATCHES, "call gradients_ready() once in a step, after its microbatches")
        loop_refusals.refuse_missing_microbatches(self._step(), self._loop.shape)
        loop_refusals.refuse_missing_backward(self._step())
        self._driver.gradients_ready(self._life.rollout_number)
        self._metrics["learning_rate"] = float(self._loop.shard.optimizer.param_groups[0]["lr"])
        self._life = self._life.at(READY)

    def skip_step(self) -> None:
        """Say that the optimizer makes no step from these microbatches: call it anywhere in a step, instead of it.

        The step keeps its number and what was measured of its responses; it has no predictions.
        """
        if self._life.place == READY:
            self._driver.stepped(made=False)
        else:
            what = "call skip_step() inside `with measured.step(number):`, instead of optimizer.step()"
            self._life.expect(BATCHES, what)
            self._driver.skip_step()
        self._life = self._life.at(SKIPPED)

    def _before_optimizer(self, *args: Any) -> None:
        if self._life.place == BETWEEN and not self._life.was_left_out:
            return
        what = "call optimizer.step() once in a step, after gradients_ready() and before the step's context ends"
        self._life.expect(READY, what)
        loop_refusals.refuse_grad_scaler()
        self._driver.about_to_step()

    def _after_optimizer(self, *args: Any) -> None:
        if self._life.place == READY:
            self._driver.stepped()
            self._life = self._life.at(STEPPED)

    # --- the state of a checkpoint ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return what a resumed run needs, by the name of the probe, beside model and optimizer: for torch.save."""
        return tensors_by_name(self._driver.states() if self._states is None else self._states)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `state_dict` returned, before `with`. ValueError when it belongs to other probes."""
        self._life.expect(OUTSIDE, "call load_state_dict(...) before `with measured_loop(...)`")
        initial = self._driver.initial_states()
        if state.keys() != initial.keys():
            raise UserError(
                f"the state is of {sorted(state)}, and the loop has {sorted(initial)}: give the same probes"
            )
        self._states = {name: from_tensors(like, state[name]) for name, like in initial.items()}

    def _step(self) -> StepRecorder:
        assert self._driver.open_step is not None
        return self._driver.open_step
