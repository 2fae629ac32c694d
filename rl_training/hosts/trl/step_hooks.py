"""The hooks of a step: wrappers of the trainer's methods, from generation to the optimizer's step, and its end.

attachment.py calls `finish`, and the driver's `stepped`, from the trainer's callbacks.

TRL has no callback between forward pass and backward, so a few methods of the trainer INSTANCE are wrapped. DeepSpeed's
engine.step is wrapped too, because the engine steps before training_step returns. Calls of the trainer's own methods
are outside the guard, so the user's errors pass through unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.engine.driver import StepDriver
from rl_training.engine.loss_info import LossInfo
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl.guard import Guard
from rl_training.hosts.trl.loop_spec import loop_spec_of
from rl_training.hosts.trl.members import FORWARD_PASS
from rl_training.hosts.trl.options import Options
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.rollouts.current import Rollouts
from rl_training.hosts.trl.scoring_calls import NO_SCORES_OF_SHARDS, NO_SCORES_TO_CHANGE, ScoringCalls
from rl_training.hosts.trl.settings.sampling import sampling_reason
from rl_training.hosts.trl.settings.whole_prompts import keep_whole_prompts
from rl_training.hosts.trl.sharding import has_sharded_weights
from rl_training.hosts.trl.trained_loss import TrainedLoss
from rl_training.hosts.trl.versions import keep_graph_of_entropies
from rl_training.hosts.trl.wrapping import wrap
from rl_training.policy.scores import Scores
from rl_training.step.batch import LossSettings

logger = logging.get_logger(__name__)


def make_step_hooks(
    trainer: GRPOTrainer,
    driver: StepDriver,
    policy: TrainerPolicy,
    guard: Guard,
    writer: EstimateWriter,
    options: Options,
) -> StepHooks:
    """Return the hooks of a trainer's steps. UserError for an intervention that it cannot train with."""
    rollouts = Rollouts(trainer, policy)
    loss = TrainedLoss(trainer, policy, options.interventions, options.spelling)
    return StepHooks(trainer, driver, policy, rollouts, loss, guard, writer, options)


class StepHooks:
    """Reports each phase of a step to the driver.

    Args:
        trainer: The trainer.
        driver: Runs the probes.
        policy: Scores as the trainer does.
        rollouts: What is known about the trainer's batches.
        loss: The trainer's loss with its interventions.
        guard: Catches errors of the measuring code.
        writer: Writes what is measured.
        options: The options of the attachment.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        driver: StepDriver,
        policy: TrainerPolicy,
        rollouts: Rollouts,
        loss: TrainedLoss,
        guard: Guard,
        writer: EstimateWriter,
        options: Options,
    ) -> None:
        self._trainer, self._driver, self._policy = trainer, driver, policy
        self._rollouts, self._loss, self._guard = rollouts, loss, guard
        self._writer, self._options = writer, options
        self._undo_optimizer = contextlib.ExitStack()

    @property
    def loss_settings(self) -> LossSettings:
        """The settings of the loss that training uses, interventions included."""
        return self._loss.settings

    def reset(self) -> None:
        """Forget the previous training, even if an exception has ended it in the middle of a step."""
        self.end()
        self._writer.begin_training()

    def begin(self, opening: str, states: Mapping[str, Any] | None) -> None:
        """Begin to measure a training: start the driver, and watch the optimizer until `end`.

        Only now are parameters and optimizer final, because some launches shard them in `train()`.

        Args:
            opening: The first line of what is announced.
            states: The states of probes in the checkpoint that training resumes from. None starts from scratch.
        """
        self._rollouts.mark_leftover_rollout()
        loop = loop_spec_of(
            self._trainer,
            self._policy,
            self.loss_settings,
            whole_prompts=bool(self._options.whole_prompts),
            spelling=self._options.spelling,
            opening=opening,
        )
        self._driver.start(loop, states)
        if self._trainer.is_deepspeed_enabled:
            wrap(self._trainer.model_wrapped, "step", self._on_engine_step, self._undo_optimizer)
        else:
            self._undo_optimizer.callback(loop.shard.optimizer.register_step_pre_hook(self._about_to_step).remove)

    def finish(self, number: int) -> dict[str, float]:
        """End a step, write what was measured, and return the numbers to log, nan where missing."""
        return self._writer.finish(self._driver, number).numbers

    def end(self) -> None:
        """Stop watching the optimizer."""
        self._undo_optimizer.close()

    def wrappers(self) -> dict[str, Callable[..., Any]]:
        """Return the wrapper of each wrapped trainer method, by the method's name.

        They pass on every argument: a subclass may have parameters that TRL's method lacks.
        """
        return {
            "_generate_and_score_completions": self._on_rollout,  # returns a rollout
            "_generate": self._on_generate_tokens,
            "_calculate_rewards": self._on_rewards,
            "_prepare_inputs": self._on_prepare_inputs,
            # The trainer's backward runs after compute_loss returns and before training_step returns.
            "compute_loss": self._on_loss,
            "training_step": self._on_training_step,
        }

    def _on_engine_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's step, after the probes."""
        self._run_probes_if_ready()
        return original(*args, **kwargs)

    def _about_to_step(self, *args: Any) -> None:
        """Tell the driver that the optimizer is about to step."""
        with self._guard.watching():
            self._driver.about_to_step()

    def _on_training_step(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._guard.step = self._trainer.state.global_step + 1
        if not self._driver.has_step:
            self._guard.attempt(lambda: self._driver.begin(self._guard.step))
        try:
            loss = original(*args, **kwargs)
        except BaseException:
            self._driver.drop_backward()
            raise
        self._guard.attempt(self._driver.finish_backward)
        self._run_probes_if_ready()
        return loss

    def _run_probes_if_ready(self) -> None:
        """Run the probes if all gradients of the step are complete."""
        if self._trainer.accelerator.sync_gradients and self._driver.awaits_gradients:
            self._guard.attempt(self._run_probes)

    def _run_probes(self) -> None:
        """Run the probes. Skip a step whose loss bypassed compute_loss."""
        if self._driver.num_microbatches:
            self._driver.gradients_ready(self._rollouts.number)
        else:
            _warn_of_a_step_without_loss(self._trainer)
            self._driver.skip_step()

    def _on_generate_tokens(self, original: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
        reason_before = self._guard.attempt(lambda: sampling_reason(self._trainer))
        generated = original(*args, **kwargs)
        if self._trainer.model.training:
            self._guard.attempt(lambda: self._rollouts.add_generated(generated, reason_before))
        return generated

    def _on_rewards(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        by_function = original(*args, **kwargs)
        if self._trainer.model.training:
            self._guard.attempt(lambda: self._rollouts.add_rewards(by_function))
        return by_function

    def _on_rollout(self, original: Callable[..., dict], *args: Any, **kwargs: Any) -> dict:
        output = original(*args, **kwargs)
        if self._trainer.model.training:
            self._guard.attempt(lambda: self._begin_rollout(output))
        return output

    def _begin_rollout(self, output: dict) -> None:
        with self._driver.costs.timed():  # with dropout or hidden rows it scores the rollout
            self._rollouts.begin(output, is_measured=self._driver.is_needed or bool(self._loss.interventions))
        self._loss.begin(self._rollouts.read(output))

    def _on_prepare_inputs(self, original: Callable[..., dict], *args: Any, **kwargs: Any) -> dict:
        with contextlib.ExitStack() as undo:
            if self._options.whole_prompts:
                keep_whole_prompts(undo)
            return original(*args, **kwargs)

    def _on_loss(self, original: Callable[..., Tensor], model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Tensor:
        trainer = self._trainer
        if not trainer.model.training or not self._driver.awaits_gradients:
            return original(model, inputs, *args, **kwargs)
        if not self._driver.num_microbatches:
            self._guard.attempt(lambda: self._plan_step(inputs))
        if self._guard.reason or not (self._needs_scores() or self._loss.interventions):
            loss = original(model, inputs, *args, **kwargs)
            self._guard.attempt(lambda: self._take_sequences(inputs, loss))
            return loss
        calls = ScoringCalls(inputs)
        with contextlib.ExitStack() as undo:
            wrap(trainer, FORWARD_PASS, calls.record, undo)
            if self._loss.interventions:
                keep_graph_of_entropies(undo)
            loss = original(model, inputs, *args, **kwargs)
        return self._guard.attempt(lambda: self._take_microbatch(inputs, calls, loss), otherwise=loss)

    def _plan_step(self, inputs: dict) -> None:
        self._driver.plan(self._rollouts.sizes_of_step(inputs), self._rollouts.responses_per_prompt)

    def _needs_scores(self) -> bool:
        """Return whether the driver or the records read the step's scores. Interventions read the loss's own."""
        return self._driver.needs_scores or self._writer.wants_rollouts_of(self._trainer.state.global_step + 1)

    def _take_sequences(self, inputs: dict, loss: Tensor) -> None:
        """Pass a microbatch without its scores to the driver. The host does not wait for the device."""
        rollout = self._rollouts.read(inputs)
        scores = Scores.unknown(rollout.completion_mask)
        self._driver.microbatch(rollout, scores, LossInfo(loss, self._loss.settings))

    def _take_microbatch(self, inputs: dict, calls: ScoringCalls, loss: Tensor) -> Tensor:
        """Pass a microbatch to the driver, and return its loss, with the gradient that interventions ask for."""
        trainer = self._trainer
        rollout, loss_scores, recorded = self._rollouts.read(inputs), calls.scores_behind(loss), None
        needs_scores = self._needs_scores()
        if self._loss.interventions and (loss_scores is None or not loss_scores[0].requires_grad):
            raise UserError(NO_SCORES_TO_CHANGE.format(trainer=type(trainer).__name__))
        is_incomplete = loss_scores is None or loss_scores[1] is None
        if needs_scores and is_incomplete and loss.grad_fn is not None and has_sharded_weights(trainer):
            raise UserError(NO_SCORES_OF_SHARDS.format(trainer=type(trainer).__name__))
        with self._driver.costs.timed():
            scores = self._policy.complete_scores(loss_scores, rollout, needs_scores)
        rollout = self._rollouts.old_logps.drop_own(rollout, scores, batches.are_hidden(inputs))
        loss = self._loss(loss, rollout, scores, inputs.get("ref_per_token_logps"))
        if trainer.mask_truncated_completions and needs_scores:
            with self._driver.costs.timed():
                recorded = self._policy.with_hidden(scores, rollout, batches.are_hidden(inputs))
        self._driver.microbatch(rollout, scores, LossInfo(loss, self._loss.settings), recorded)
        return loss


def _warn_of_a_step_without_loss(trainer: GRPOTrainer) -> None:
    """Warn, once, about a step whose loss was not computed by compute_loss, the method that is wrapped."""
    if trainer.accelerator.is_main_process:
        logger.warning_once(
            f"{type(trainer).__name__}.training_step does not call compute_loss, where probes see the loss: its steps "
            "have no estimates. Call super().training_step, or compute the loss in compute_loss"
        )
