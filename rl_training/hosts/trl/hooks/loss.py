"""Passes each microbatch on to the driver once its loss is computed, with the scores that the loss is computed from."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.driver import StepDriver
from rl_training.engine.loss_info import LossInfo
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl.guard import Guard, Hook
from rl_training.hosts.trl.hooks.scoring_calls import NO_SCORES_OF_SHARDS, NO_SCORES_TO_CHANGE, LossScores, ScoringCalls
from rl_training.hosts.trl.hooks.unseen_loss import refuse_an_unchanged_loss
from rl_training.hosts.trl.measured_trainer import MeasuredTrainer
from rl_training.hosts.trl.members import FORWARD_PASS
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.rollouts.old_logps import without_own_logps
from rl_training.hosts.trl.sharding import has_sharded_weights
from rl_training.hosts.trl.versions import argument_of, keep_graph_of_entropies
from rl_training.hosts.trl.wrapping import wrap
from rl_training.policy.scores import Scores


class LossHook:
    """The hook around compute_loss. The trainer's backward runs after it returns and before training_step returns.

    Args:
        measured: The trainer.
        driver: Runs the probes.
        guard: Runs the hook of the forward pass within the loss.
        writer: Says which steps are recorded.
    """

    def __init__(self, measured: MeasuredTrainer, driver: StepDriver, guard: Guard, writer: EstimateWriter) -> None:
        self._trainer = measured.trainer
        self._policy = measured.policy
        self._rollouts = measured.rollouts
        self._loss = measured.loss
        self._options = measured.options
        self._driver = driver
        self._guard = guard
        self._writer = writer

    def hooks(self) -> dict[str, Hook]:
        """Return the hook around each trainer method, by the method's name."""
        return {"compute_loss": self.around_loss}

    def around_loss(self, *args: Any, **kwargs: Any) -> Generator[None, Tensor, Tensor | None]:
        """Pass a microbatch to the driver, and return its loss with the gradient that interventions ask for."""
        if not self._trainer.model.training or not self._driver.awaits_gradients:
            self._refuse_a_loss_out_of_step()
            yield
            return None
        inputs = argument_of("inputs", "compute_loss", args, kwargs)
        if not self._driver.num_microbatches:
            self._driver.plan(self._rollouts.sizes_of_step(inputs), self._rollouts.current.responses_per_prompt)
        needs_scores = self._needs_scores()
        if not needs_scores and not self._loss.interventions:
            trl_loss = yield
            self._take_sequences(inputs, trl_loss)
            return None
        calls = ScoringCalls(inputs)
        with contextlib.ExitStack() as undo:
            wrap(self._trainer, FORWARD_PASS, self._guard.around(calls.around_forward_pass), undo)
            if self._loss.interventions:
                keep_graph_of_entropies(undo)
            trl_loss = yield
        return self._take_microbatch(inputs, calls.scores_behind(trl_loss), trl_loss, needs_scores)

    def _refuse_a_loss_out_of_step(self) -> None:
        """Raise UserError for a loss that is trained on outside training_step, or after the step's gradients.

        A loss that is computed in evaluation mode is taken for an evaluation's. If training uses it all the same, the
        hook of training_step raises.
        """
        is_trained_on = self._trainer.model.training and torch.is_grad_enabled()
        is_late = self._driver.has_step and self._options.training_needs_measurements
        if is_trained_on and (self._loss.interventions or is_late):
            refuse_an_unchanged_loss(self._trainer, self._options)

    def _needs_scores(self) -> bool:
        """Return whether the driver or the records read the step's scores. Interventions read the loss's own."""
        return self._driver.needs_scores or self._writer.wants_rollouts_of(self._trainer.state.global_step + 1)

    def _take_sequences(self, inputs: Mapping[str, Any], loss: Tensor) -> None:
        """Pass a microbatch without its scores to the driver. The host does not wait for the device."""
        rollout = self._rollouts.read(inputs, self._driver.num_microbatches)
        scores = Scores.unknown(rollout.completion_mask)
        self._driver.microbatch(rollout, scores, LossInfo(loss, self._loss.settings))

    def _take_microbatch(
        self, inputs: Mapping[str, Any], loss_scores: LossScores | None, trl_loss: Tensor, needs_scores: bool
    ) -> Tensor:
        """Pass a microbatch to the driver, and return the loss to train on.

        Each step needs what the one before it returns:

            scores         what training's forward pass left out is scored here
            rollout        without old log-probabilities that are the policy's own, which the scores tell
            trained loss   interventions change the weights of these scores by this rollout
            driver         last: it sets hooks for the backward of the trained loss, under which no other pass may run

        Args:
            inputs: TRL's dictionary of the microbatch.
            loss_scores: The scores that TRL's loss is computed from. None if it uses none.
            trl_loss: TRL's loss.
            needs_scores: Whether the driver or the records read the scores.
        """
        self._refuse_missing_scores(loss_scores, trl_loss, needs_scores)
        batch = self._rollouts.read(inputs, self._driver.num_microbatches)
        hidden = batches.are_hidden(inputs)
        with self._driver.costs.timed():
            scores = self._policy.complete_scores(loss_scores, batch, needs_scores)
        rollout = without_own_logps(batch, scores, hidden, self._policy, self._rollouts.current.has_own_old_logps)
        trained_loss = self._loss(trl_loss, rollout, scores, inputs.get("ref_per_token_logps"))
        scores_of_all_rows = None
        if self._trainer.mask_truncated_completions and needs_scores:
            with self._driver.costs.timed():
                scores_of_all_rows = self._policy.with_hidden(scores, rollout, hidden)
        self._driver.microbatch(rollout, scores, LossInfo(trained_loss, self._loss.settings), scores_of_all_rows)
        return trained_loss

    def _refuse_missing_scores(self, loss_scores: LossScores | None, trl_loss: Tensor, needs_scores: bool) -> None:
        """Raise UserError if interventions lack the scores to change, or scores are missing that cannot be computed."""
        name = type(self._trainer).__name__
        if self._loss.interventions and (loss_scores is None or not loss_scores[0].requires_grad):
            raise UserError(NO_SCORES_TO_CHANGE.format(trainer=name))
        is_incomplete = loss_scores is None or loss_scores[1] is None
        if needs_scores and is_incomplete and trl_loss.grad_fn is not None and has_sharded_weights(self._trainer):
            raise UserError(NO_SCORES_OF_SHARDS.format(trainer=name))
