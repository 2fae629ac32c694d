"""The live driver: it tells probes of the moments of a running trl.GRPOTrainer, ours or a user's own.

    attachment = attach(trainer, [SimpleEntropyProbe()])
    trainer.train()

TRL has no callback between forward pass and backward, so the driver stands in front of a few methods of the trainer
INSTANCE, listed in `Attachment._seams`, and of DeepSpeed's engine.step: the engine steps before training_step returns.
`remove` takes every one of them away again.

Reading is all it does: the same parameters, random streams and rollouts with and without probes, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOTrainer

from rl_training.live import host
from rl_training.live.answers import Answers
from rl_training.live.context import Step, build_context, common_num_folds, plan_folds, tap_for
from rl_training.live.optimizer import sharding_of, view_optimizer
from rl_training.live.policy import LogpsAndEntropies, TrainerPolicy
from rl_training.live.private_members import refuse_unknown_versions
from rl_training.live.refusals import (
    refuse_split_prompts,
    refuse_the_same_name,
    refuse_what_cannot_be_measured,
)
from rl_training.live.reward_functions import named_rewards
from rl_training.live.rollouts import Rollouts
from rl_training.live.sampled_policy import why_no_fresh_responses, why_padding_matters, why_sampled_otherwise
from rl_training.live.sequences_of_step import sequences_of_step
from rl_training.live.sharding import Replicated, Sharding
from rl_training.live.tap import GradientTap
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.scores import Scores
from rl_training.probes.base import Need, Probe
from rl_training.records.checkpoint_states import load_probe_states, save_probe_states
from rl_training.records.jsonl import Records
from rl_training.records.loggers import CORE
from rl_training.step.types import Microbatch


def attach(
    trainer: GRPOTrainer, probes: Sequence[Probe], records: Records | None = None, whole_prompts: bool = False
) -> Attachment:
    """Returns the attachment of these probes to a trainer: call `.remove()`, or use it as a context manager.

    records        where metrics.jsonl and probes.jsonl are written; without it estimates go to the trainer's log only
    whole_prompts  keep the responses of a prompt in one microbatch (another order of summation, the same mathematics):
                   without it what needs folds of whole prompts is nan, with that reason

    Raises ValueError when the trainer already has probes, and when measuring would harm training or is not possible at
    all, saying what to change. What a single probe cannot measure is nan with the reason.
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
        refuse_the_same_name(probes)
        if whole_prompts:
            refuse_split_prompts(trainer)
        if probes:
            refuse_what_cannot_be_measured(trainer)
        self.probes = tuple(probes)
        self._trainer = trainer
        self._records = records if trainer.accelerator.is_main_process else None
        self._answers = Answers(trainer, self._records)
        self._num_folds = common_num_folds(self.probes)
        plan_folds(trainer, self._num_folds, trainer.args.gradient_accumulation_steps)  # raises if it cannot
        self._sharding: Sharding = Replicated(trainer)  # these three until training has laid out what it trains
        self._parameters: dict[str, nn.Parameter] = {}
        self._tap: GradientTap | None = None
        self._policy = TrainerPolicy(trainer)
        self._step: Step | None = None  # while it lasts
        self._sampled_otherwise = why_sampled_otherwise(trainer)
        self._no_fresh_responses = why_no_fresh_responses(trainer)
        self._padding_is_checked = False
        self._rollouts = Rollouts(trainer, self._policy, whole_prompts)
        self._trained = False
        self._in_loss = False
        self._latest_scores: tuple[Tensor, Tensor] | None = None
        self._undo = contextlib.ExitStack()
        self._undo_engine = contextlib.ExitStack()
        for name, method in self._seams().items():
            host.stand_in_front_of(trainer, name, method, self._undo)
        self._undo.callback(setattr, trainer, "reward_funcs", trainer.reward_funcs)
        trainer.reward_funcs = named_rewards(trainer)
        for callback in trainer.callback_handler.callbacks:
            if self.probes and isinstance(callback, PrinterCallback | ProgressCallback):
                host.stand_in_front_of(callback, "on_log", self._on_print, self._undo)
        trainer.add_callback(self)
        self._undo.callback(trainer.remove_callback, self)

    @property
    def latest(self) -> Mapping[str, Estimate]:
        """What the probes answered last, by name; the same on every rank where the probe says so."""
        return self._answers.latest

    def _seams(self) -> dict[str, Callable[..., Any]]:
        """Returns what stands in front of which method of the trainer."""
        return {
            "_generate_and_score_completions": self._on_generate,  # a rollout is there
            "_generate": self._rollouts.on_turns,  # which tokens a tool wrote, before truncated responses are taken out
            "_calculate_rewards": self._rollouts.on_rewards,  # which TRL does not hand on
            "_prepare_inputs": self._rollouts.on_prepare_inputs,  # whole-prompt order of the microbatches
            "_get_per_token_logps_and_entropies": self._on_scores,  # of the training's own forward pass
            # Between the returns of these two lies the trainer's own backward: the tap is armed.
            "compute_loss": self._on_loss,
            "training_step": self._on_training_step,
            # The probes' state is in the checkpoint before it counts as complete, and so is every process's part.
            "_save_optimizer_and_scheduler": self._on_save,
            "_save_rng_state": self._on_save_rng_state,
            "_load_optimizer_and_scheduler": self._on_load,
        }

    def remove(self) -> None:
        """Takes everything off the trainer again; what was measured stays measured."""
        for batch in self._trainer._buffered_inputs or []:
            for key in host.RIDING_ALONG:
                batch.pop(key, None)
        self._undo_engine.close()
        self._undo.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    # --- the seams, in the order of a step ------------------------------------------------------------------------

    def _on_training_step(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self._step is None:
            with self._whole_weights():
                self._step = self._begin_step()
        try:
            loss = original(*args, **kwargs)
        finally:
            if self._tap is not None:
                self._tap.disarm()
        if not self._step.is_complete:  # as it is when DeepSpeed's engine has stepped already
            with self._whole_weights(self._step):
                self._after_backward(self._step)
        return loss

    def _on_engine_step(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        assert self._step is not None
        if self._tap is not None:
            self._tap.disarm()
        with self._whole_weights(self._step):
            self._after_backward(self._step)
        original(*args, **kwargs)

    def _whole_weights(self, step: Step | None = None) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which probes may look at the weights, which ZeRO-3 and FSDP2 have cut."""
        if step is None:
            measured = any(probe.measures_at(self._trainer.state.global_step + 1) for probe in self.probes)
        else:
            measured = bool(step.probes) and self._trainer.accelerator.sync_gradients
        return self._sharding.whole_weights() if measured else contextlib.nullcontext()

    def _begin_step(self) -> Step:
        trainer = self._trainer
        probes = [probe for probe in self.probes if probe.measures_at(trainer.state.global_step + 1)]
        if not probes:
            return Step([], (), None)
        folds = plan_folds(trainer, self._num_folds, trainer.current_gradient_accumulation_steps)
        optimizer = view_optimizer(self._sharding, self._parameters)
        if self._tap is not None:
            starts = range(0, folds[-1].stop, trainer.args.per_device_train_batch_size)
            row_of = [next(k for k, rows in enumerate(folds) if start in rows) for start in starts]
            self._tap.start_step(row_of, len(folds), optimizer.states)
        return Step(probes, folds, optimizer)

    def _after_backward(self, step: Step) -> None:
        step.tell("on_backward", step.microbatches[-1])
        if not self._trainer.accelerator.sync_gradients:
            return
        step.is_complete = True
        if step.probes:
            known = (self._parameters, self._policy, self._tap, self._rollouts.generation)
            context = build_context(step, self._trainer, self._sharding, *known)
            if not self._padding_is_checked:
                padding = why_padding_matters(self._trainer, self._policy, context.rollout, context.reduce)
                self._sampled_otherwise = self._sampled_otherwise or padding
                self._padding_is_checked = True
            step.context = dataclasses.replace(
                context,
                sampled_otherwise=self._sampled_otherwise,
                no_fresh_responses=self._sampled_otherwise or self._no_fresh_responses,
            )
            step.tell("on_pre_optimizer_step", step.context)
        for microbatch in step.microbatches:  # measured or not: a later iteration over them may be
            self._rollouts.generation.learned.update(microbatch.rollout.prompt_index.tolist())

    def _on_generate(self, original: Callable[..., dict], inputs: list[dict]) -> dict:
        output = original(inputs)
        if self._trainer.model.training:
            self._rollouts.begin(output, keep_logps=bool(self.probes))
            if self._step is not None:
                self._step.tell("on_rollout", self._rollouts.read(output))
        return output

    def _on_scores(
        self, original: LogpsAndEntropies, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logps, entropies, aux_loss = original(*args, **kwargs)
        if self._in_loss:
            self._latest_scores = (logps.detach(), entropies.detach())
            if self._step is not None and self._step.probes:
                self._step.watch_loss(logps, entropies, other_terms=aux_loss is not None)
        return logps, entropies, aux_loss

    def _on_loss(self, original: Callable[..., Tensor], model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Tensor:
        step = self._step
        if not self._trainer.model.training or step is None:
            return original(model, inputs, *args, **kwargs)
        self._in_loss = True
        try:
            loss = original(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        assert self._latest_scores is not None
        rollout = self._rollouts.read(inputs)
        scores = Scores(*self._latest_scores, mask=rollout.completion_mask)
        if self._trainer.mask_truncated_completions and (step.probes or self._records is not None):
            scores = self._policy.with_hidden(scores, rollout, host.are_hidden(inputs))
        step.microbatches.append(Microbatch(len(step.microbatches), rollout, scores))
        step.tell("on_forward", step.microbatches[-1])
        if self._tap is not None and step.probes:
            self._tap.arm(len(step.microbatches) - 1)
        return loss

    # --- the callbacks --------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.probes and getattr(self._trainer.model_wrapped, "static_graph", False):
            raise ValueError("DDP's static_graph is silently corrupted by a second backward: switch it off")
        if self._trained and state.global_step == 0 and (self.probes or self._records is not None):
            raise ValueError(
                "this trainer has trained before, and its records and sums would begin again in the middle: go on "
                "after them with train(resume_from_checkpoint=...), or remove() these probes and attach new ones"
            )
        self._undo_engine.close()  # of a training that ended by an exception, in the middle of a step
        self._step = None
        if self.probes:
            self._begin_training()
        if self._records is not None:
            self._records.start(after_step=state.global_step)

    def _begin_training(self) -> None:
        """Looks where training has put parameters and optimizer, which under some launches is done by now only."""
        trainer = self._trainer
        self._sharding = sharding_of(trainer)
        self._sharding.refuse_what_does_not_fit(self._num_vectors())
        self._parameters = self._sharding.trained()
        self._tap = tap_for(self.probes, self._parameters)
        if trainer.is_deepspeed_enabled:
            engine = trainer.model_wrapped
            engine.step = functools.partial(self._on_engine_step, engine.step)
            self._undo_engine.callback(delattr, engine, "step")

    def _num_vectors(self) -> int:
        """Returns how many fp32 vectors of all trained parameters a measured step holds on the device."""
        gradient_and_moments, folding = 3, [p for p in self.probes if Need.FOLD_GRADIENTS in p.needs and not p.offload]
        folds = plan_folds(self._trainer, self._num_folds, self._trainer.args.gradient_accumulation_steps)
        return gradient_and_moments + (2 * len(folds) + 2 if folding else 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._undo_engine.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_started = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step is not None and self._step.context is not None:
            with self._whole_weights(self._step):
                self._step.tell("on_optimizer_step", self._step.context)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trained = True
        step, self._step = self._step, None
        if step is not None and self._records is not None and self._records.wants_rollouts_of(state.global_step):
            sequences = sequences_of_step(step.microbatches, self._policy.decode)
            self._records.write_rollouts(state.global_step, sequences)
        if step is None or step.context is None:
            return
        with self._whole_weights(step):
            self._answers.take(step)
        driver_bytes = self._tap.num_bytes if self._tap is not None else 0
        self._answers.log_costs(step, self.probes, time.perf_counter() - self._step_started, driver_bytes)
        if self._tap is not None:
            self._tap.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if self._records is not None and "loss" in logs:
            self._records.write_metrics(state.global_step, logs)
        elif self._records is not None and "eval_loss" in logs:  # and not the summary at the end of training
            self._records.write_evaluation(state.global_step, logs)

    def _on_print(self, original: Callable[..., None], *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Prints what the trainer logs, of the probes' numbers the core ones; dashboards and records have all."""
        ours = {key for name in self.latest for key in (name, f"{name}_se")} - {*CORE}
        short = {k: v for k, v in logs.items() if k not in ours and (k in CORE or not k.startswith("probe_cost/"))}
        original(*args, logs=short, **kwargs)

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
