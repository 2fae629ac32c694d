"""The live driver: it tells probes of the moments of a running trl.GRPOTrainer, ours or a user's own.

    attachment = attach(trainer, [SimpleEntropyProbe()])
    trainer.train()

TRL has no callback between forward and backward, so the driver stands in front of a few methods of the trainer
INSTANCE, and `remove` takes every one of them away again:

    _generate_and_score_completions        a rollout is there
    _calculate_rewards                     the rewards, which TRL does not hand on
    _prepare_inputs                        whole-prompt order of the microbatches
    _get_per_token_logps_and_entropies     the scores of the training forward
    compute_loss .. training_step          between their returns lies the trainer's own backward: the tap is armed
    DeepSpeed's engine.step                the end of the last backward: the engine steps before training_step returns
    _save_ / _load_optimizer_and_scheduler the probes' state, in the checkpoint before it counts as complete
    _save_rng_state                        every process has written its part before the checkpoint counts as complete

Reading is all it does: the same parameters, random streams and rollouts with and without probes, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.live import host, zero
from rl_training.live.optimizer import deepspeed_engine, mean_gradients, view_optimizer
from rl_training.live.policy import LogpsAndEntropies, TrainerPolicy
from rl_training.live.private_members import refuse_unknown_versions
from rl_training.live.refusals import refuse_dependence_on_padding, refuse_split_prompts, refuse_what_cannot_be_measured
from rl_training.live.tap import GradientTap
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.folds import fold_numbers, fold_ranges, ranges_of, split_prompts
from rl_training.mathematics.scores import Scores
from rl_training.probes.base import Need, Probe
from rl_training.records.checkpoints import load_probe_states, save_probe_states
from rl_training.records.jsonl import Records
from rl_training.step.rollout import Rollout
from rl_training.step.slices import fill_slices
from rl_training.step.types import Microbatch, OptimizerView, StepContext

logger = logging.get_logger(__name__)

RANKS_THAT_ARE_FOLDS = 8  # from so many ranks on, each is one fold by default: enough for an error bar


def attach(
    trainer: GRPOTrainer, probes: Sequence[Probe], records: Records | None = None, whole_prompts: bool = False
) -> Attachment:
    """Returns the attachment of these probes to a trainer: call `.remove()`, or use it as a context manager.

    records        where metrics.jsonl and probes.jsonl are written; without it estimates go to the trainer's log only
    whole_prompts  keep the responses of a prompt in one microbatch (another order of summation, the same mathematics):
                   without it what needs folds of whole prompts is nan, with that reason

    Raises ValueError when the trainer already has probes, and when its settings would make the measurement wrong or
    harm training, saying what to change.
    """
    return Attachment(trainer, probes, records, whole_prompts)


class Attachment(TrainerCallback):
    """Probes attached to a trainer, until `remove`. Made by `attach`."""

    def __init__(
        self, trainer: GRPOTrainer, probes: Sequence[Probe], records: Records | None, whole_prompts: bool
    ) -> None:
        refuse_unknown_versions(trainer)
        if any(isinstance(callback, Attachment) for callback in trainer.callback_handler.callbacks):
            raise ValueError("this trainer already has probes attached: remove() those first, or pass all in one list")
        names = Counter(probe.name for probe in probes)
        if any(count > 1 for count in names.values()):
            raise ValueError(f"two probes have the same name: {[n for n, count in names.items() if count > 1]}")
        if whole_prompts:
            refuse_split_prompts(trainer)
        if probes:
            refuse_what_cannot_be_measured(trainer)
        self.probes = tuple(probes)
        self._trainer = trainer
        self._records = records if trainer.accelerator.is_main_process else None
        self._whole_prompts = whole_prompts
        self._parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        self._seconds: dict[str, float] = {}
        self._times_missing: Counter[str] = Counter()
        self._scored_before = False
        self._generations = 0
        self._generated_at = -1  # global_step at which the buffered rollout was sampled
        self._rewards: Tensor | None = None  # of the latest generation batch, all ranks
        self._in_loss = False
        self._latest_scores: tuple[Tensor, Tensor] | None = None
        self._loss_weights: list[Tensor] = []  # by microbatch
        self._learned: set[int] = set()  # prompts of the present generation that a step has learned from
        self._microbatches: list[Microbatch] = []
        self._active: list[Probe] = []
        self._context: StepContext | None = None
        self._optimizer: OptimizerView | None = None  # of a measured step, while it lasts
        self._undo = contextlib.ExitStack()
        self._undo_engine = contextlib.ExitStack()
        needs = functools.reduce(lambda a, b: a | b, (probe.needs for probe in probes), Need.NOTHING)
        folding = [probe for probe in probes if Need.FOLD_GRADIENTS in probe.needs]
        self._num_folds = folding[0].num_folds if folding else None
        if any(probe.num_folds != self._num_folds for probe in folding):
            raise ValueError(f"one set of folds serves all probes: give {[p.name for p in folding]} the same num_folds")
        self._folds = self._plan_folds(trainer.args.gradient_accumulation_steps)
        self._tap = None
        if needs:
            keep_rows, keep_sq_norms = Need.FOLD_GRADIENTS in needs, Need.MICROBATCH_SQ_NORMS in needs
            device = "cpu" if any(probe.offload for probe in probes) else None
            self._tap = GradientTap(self._parameters, keep_rows, keep_sq_norms, device)
        self._policy = TrainerPolicy(trainer)
        self._stand_in_front_of("_generate_and_score_completions", self._on_generate)
        self._stand_in_front_of("_calculate_rewards", self._on_rewards)
        self._stand_in_front_of("_prepare_inputs", self._on_prepare_inputs)
        self._stand_in_front_of("_get_per_token_logps_and_entropies", self._on_scores)
        self._stand_in_front_of("compute_loss", self._on_loss)
        self._stand_in_front_of("training_step", self._on_training_step)
        self._stand_in_front_of("_save_optimizer_and_scheduler", self._on_save)
        self._stand_in_front_of("_save_rng_state", self._on_save_rng_state)
        self._stand_in_front_of("_load_optimizer_and_scheduler", self._on_load)
        trainer.add_callback(self)
        self._undo.callback(trainer.remove_callback, self)

    def remove(self) -> None:
        """Takes everything off the trainer again; what was measured stays measured."""
        for batch in self._trainer._buffered_inputs or []:
            batch.pop(host.ROLLOUT_ROW, None)
            batch.pop(host.REWARD, None)
        self._undo_engine.close()
        self._undo.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def _stand_in_front_of(self, name: str, method: Callable[..., Any]) -> None:
        """Makes trainer.<name>(...) call method(original, ...), until removed."""
        before = vars(self._trainer).get(name)  # somebody else may already stand there
        setattr(self._trainer, name, functools.partial(method, getattr(self._trainer, name)))
        if before is None:
            self._undo.callback(delattr, self._trainer, name)
        else:
            self._undo.callback(setattr, self._trainer, name, before)

    # --- the seams, in the order of a step ------------------------------------------------------------------------

    def _on_training_step(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not self._microbatches:
            self._start_step()
        try:
            loss = original(*args, **kwargs)
        finally:
            if self._tap is not None:
                self._tap.disarm()
        if self._microbatches:  # none are left when DeepSpeed's engine has stepped already
            self._after_backward()
        return loss

    def _on_engine_step(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._tap is not None:
            self._tap.disarm()
        self._after_backward()
        original(*args, **kwargs)

    def _after_backward(self) -> None:
        self._tell("on_backward", self._microbatches[-1])
        if self._trainer.accelerator.sync_gradients:
            if self._active:
                self._context = self._step_context()
                self._tell("on_pre_optimizer_step", self._context)
            for microbatch in self._microbatches:  # measured or not: a later iteration over them may be
                self._learned.update(microbatch.rollout.prompt_index.tolist())
            self._microbatches, self._loss_weights = [], []

    def _start_step(self) -> None:
        step = self._trainer.state.global_step + 1
        self._active = [probe for probe in self.probes if probe.measures_at(step)]
        self._seconds = dict.fromkeys((probe.name for probe in self._active), 0.0)
        if not self._active:
            return
        self._optimizer = view_optimizer(self._trainer, self._parameters)
        num_microbatches = self._trainer.current_gradient_accumulation_steps
        self._folds = self._plan_folds(num_microbatches)
        if self._tap is not None:
            starts = range(0, self._folds[-1].stop, self._trainer.args.per_device_train_batch_size)
            row_of = [next(k for k, rows in enumerate(self._folds) if start in rows) for start in starts]
            self._tap.start_step(row_of, len(self._folds), self._optimizer.states)

    def _plan_folds(self, num_microbatches: int) -> tuple[range, ...]:
        """Returns the rows of this rank's folds: by default one per microbatch, on many ranks one each."""
        sizes = [self._trainer.args.per_device_train_batch_size] * num_microbatches
        default = 1 if self._trainer.accelerator.num_processes >= RANKS_THAT_ARE_FOLDS else num_microbatches
        if self._num_folds is None or num_microbatches != self._trainer.args.gradient_accumulation_steps:
            return fold_ranges(sizes, default, self._trainer.num_generations)  # the last step of an epoch may be short
        return fold_ranges(sizes, self._num_folds, self._trainer.num_generations)

    def _on_generate(self, original: Callable[..., dict], inputs: list[dict]) -> dict:
        output = original(inputs)
        if self._trainer.model.training:
            ids = output["completion_ids"]
            output[host.ROLLOUT_ROW] = torch.arange(len(ids), device=ids.device)
            if self._rewards is not None and host.REWARD not in output:  # a buffer has put its own there
                first = self._trainer.accelerator.process_index * len(ids)  # rewards are of all ranks
                output[host.REWARD] = self._rewards[first : first + len(ids)].to(ids.device)
            self._generations += 1
            self._learned.clear()
            self._generated_at = self._trainer.state.global_step
            self._tell("on_rollout", self._read(output))
        return output

    def _on_rewards(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        by_function = original(*args, **kwargs)
        self._rewards = (by_function * self._trainer.reward_weights.to(by_function.device)).nansum(dim=1)
        return by_function

    def _on_prepare_inputs(self, original: Callable[..., dict], generation_batch: Any) -> dict:
        generations = self._generations
        inputs = original(generation_batch)
        if self._whole_prompts and self._generations > generations:
            buffered = self._trainer._buffered_inputs
            position = next(i for i, batch in enumerate(buffered) if batch is inputs)
            self._trainer._buffered_inputs = host.in_whole_prompt_order(buffered)
            inputs = self._trainer._buffered_inputs[position]
        return inputs

    def _on_scores(
        self, original: LogpsAndEntropies, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logps, entropies, aux_loss = original(*args, **kwargs)
        if self._in_loss:
            self._latest_scores = (logps.detach(), entropies.detach())
            if self._active:
                logps.register_hook(self._loss_weights.append)  # fires in the trainer's own backward
        return logps, entropies, aux_loss

    def _on_loss(self, original: Callable[..., Tensor], model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Tensor:
        if not self._trainer.model.training:
            return original(model, inputs, *args, **kwargs)
        self._in_loss = True
        try:
            loss = original(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        assert self._latest_scores is not None
        scores = Scores(*self._latest_scores, mask=inputs["completion_mask"])
        self._microbatches.append(Microbatch(len(self._microbatches), self._read(inputs), scores))
        self._tell("on_forward", self._microbatches[-1])
        if self._tap is not None and self._active:
            self._tap.arm(len(self._microbatches) - 1)
        return loss

    def _read(self, inputs: dict) -> Rollout:
        args = self._trainer.args
        first_prompt = self._generations * args.per_device_train_batch_size * args.steps_per_generation
        on_policy = self._generated_at == self._trainer.state.global_step
        return host.read_rollout(inputs, first_prompt, self._trainer.num_generations, on_policy)

    def _step_context(self) -> StepContext:
        assert self._optimizer is not None
        trainer, group = self._trainer, self._trainer.num_generations
        rollout, scores, loss_weights = host.join_microbatches(self._microbatches, self._loss_weights)
        microbatch_rows = ranges_of([m.rollout.num_sequences for m in self._microbatches])
        index = rollout.prompt_index
        prompts, counts = index.unique(return_counts=True)
        num_in_parts = [sum(len(index[r.start : r.stop].unique()) for r in p) for p in (microbatch_rows, self._folds)]
        violations = torch.tensor(
            [bool((counts != group).any()), max(num_in_parts) > len(prompts)], device=index.device
        )
        incomplete, split = self._reduce(violations.double()).tolist()
        whole_prompts = incomplete == 0 and split == 0
        reused = not self._learned.isdisjoint(prompts.tolist())
        if not self._scored_before:
            refuse_dependence_on_padding(trainer, self._policy, rollout)
            self._scored_before = True
        fold_gradients = None
        folding = next((probe for probe in self._active if Need.FOLD_GRADIENTS in probe.needs), None)
        if folding is not None and self._tap is not None and self._tap.fold_gradients is not None and whole_prompts:
            fold_gradients = self._tap.fold_gradients
            with self._timed(folding):
                score = functools.partial(self._policy.score, rollout)
                fill_slices(fold_gradients, self._parameters, self._folds, microbatch_rows, loss_weights, score)
        return StepContext(
            step=trainer.state.global_step + 1,
            parameters=self._parameters,
            gradients=mean_gradients(trainer, self._parameters),
            fold_gradients=fold_gradients,
            microbatch_sq_norms=self._tap.sq_norms if self._tap is not None else None,
            optimizer=self._optimizer,
            rollout=rollout,
            scores=scores,
            loss_weights=loss_weights,
            microbatch_rows=microbatch_rows,
            fold=fold_numbers(self._folds).to(index.device)
            if whole_prompts
            else split_prompts(index, len(self._folds)),
            reused=reused,
            responses_per_prompt=group,
            complete_prompts=incomplete == 0,
            whole_prompts=whole_prompts,
            dr_grpo=host.is_dr_grpo(trainer),
            num_ranks=trainer.accelerator.num_processes,
            reduce=self._reduce,
            policy=self._policy,
        )

    def _reduce(self, tensor: Tensor) -> Tensor:
        if self._trainer.accelerator.num_processes == 1:
            return tensor
        return self._trainer.accelerator.reduce(tensor, reduction="sum")

    # --- the callbacks --------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.probes and getattr(self._trainer.model_wrapped, "static_graph", False):
            raise ValueError("DDP's static_graph is silently corrupted by a second backward: switch it off")
        engine = deepspeed_engine(self._trainer)
        self._undo_engine.close()  # of a training that ended by an exception, in the middle of a step
        self._microbatches, self._loss_weights, self._active, self._context = [], [], [], None
        if self.probes and engine is not None:
            zero.refuse_other_optimizers(engine)
            engine.step = functools.partial(self._on_engine_step, engine.step)
            self._undo_engine.callback(delattr, engine, "step")
        if self._records is not None:
            self._records.start(after_step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._undo_engine.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_started = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._context is not None:
            self._tell("on_optimizer_step", self._context)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._context is None:
            return
        metrics = self._trainer._metrics["train"]  # averaged over `logging_steps`: ours keep the latest step's value
        for probe in self._active:
            with self._timed(probe):
                estimates = probe.measure(self._context)
            if not estimates:
                raise ValueError(
                    f"probe {probe.name!r} measured nothing at step {state.global_step}: answer nan instead"
                )
            if self._records is not None:
                self._records.write_estimates(state.global_step, self._context.num_ranks, probe.name, estimates)
            for name, estimate in estimates.items():
                for key, value in ((name, estimate.value), (f"{name}_se", estimate.stderr)):
                    metrics.pop(key, None)
                    if not math.isnan(value):
                        metrics[key].append(value)
            self._warn_of_missing(estimates)
        num_bytes = sum(probe.num_buffer_bytes for probe in self.probes) + (self._tap.num_bytes if self._tap else 0)
        metrics["probe_cost/peak_bytes"].append(float(num_bytes))
        for name, seconds in self._seconds.items():
            metrics[f"probe_cost/{name}_seconds"].append(seconds)
        step_seconds = time.perf_counter() - self._step_started
        metrics["probe_cost/fraction_of_step"].append(sum(self._seconds.values()) / step_seconds)
        self._context = self._optimizer = None
        if self._tap is not None:
            self._tap.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if self._records is not None and "loss" in logs:
            self._records.write_metrics(state.global_step, logs)
        elif self._records is not None and "eval_loss" in logs:  # and not the summary at the end of training
            self._records.write_evaluation(state.global_step, logs)

    def _on_save(self, original: Callable[[str], None], output_dir: str) -> None:
        original(output_dir)
        if self._trainer.args.should_save:
            save_probe_states(self.probes, Path(output_dir), self._trainer.accelerator.num_processes)

    def _on_save_rng_state(self, original: Callable[[str], None], output_dir: str) -> None:
        original(output_dir)
        self._trainer.accelerator.wait_for_everyone()  # the main process now writes trainer_state.json

    def _on_load(self, original: Callable[[str | None], None], checkpoint: str | None) -> None:
        original(checkpoint)
        if checkpoint is not None:
            load_probe_states(self.probes, Path(checkpoint))

    # --- telling --------------------------------------------------------------------------------------------------

    def _tell(self, moment: str, what: Rollout | Microbatch | StepContext) -> None:
        for probe in self._active:
            with self._timed(probe):
                getattr(probe, moment)(what)

    @contextlib.contextmanager
    def _timed(self, probe: Probe) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[probe.name] += time.perf_counter() - start

    def _warn_of_missing(self, estimates: Mapping[str, Estimate]) -> None:
        """Says once why numbers are missing, when that reason holds at a second step: at a first step, some must be."""
        missing: dict[str, list[str]] = {}
        for name, estimate in estimates.items():
            if math.isnan(estimate.value):
                missing.setdefault(estimate.reason, []).append(name)
        for reason, names in missing.items():
            self._times_missing[reason] += 1
            if self._times_missing[reason] == 2 and self._trainer.accelerator.is_main_process:
                logger.warning(f"not measured: {', '.join(names)}: {reason}")
