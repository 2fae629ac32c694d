"""Training with interventions: the functions that predict their effect also set the weights of each microbatch's loss.

    loss + Σ_ik (c' − c)_ik log π(t_ik) + (d' − d)_ik h_ik          c', d' held fixed

c and d are the weights of log-probabilities and entropies in the trainer's loss, and c' and d' those that the functions
return when applied in order. This sum has the gradient of a loss with weights c' and d'. Its value, which is logged,
stays that of the trainer's loss.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.trl.settings.loss import loss_settings
from rl_training.hosts.trl.settings.rollout_shape import steps_per_rollout
from rl_training.hosts.trl.settings.spelling import Spelling
from rl_training.interventions.loss import LossInputs, microbatch_inputs, zero_advantage_share
from rl_training.interventions.named import NEEDS, RATIOS_ARE_ONE, Intervention
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.batch import LossSettings
from rl_training.step.loss_weights import LossWeights

logger = logging.get_logger(__name__)


def with_settings(args: GRPOConfig, interventions: Sequence[Intervention]) -> GRPOConfig:
    """Return a trainer's arguments with the learning rate and the clipping threshold of these interventions.

    Without such an intervention, return the same object: whoever made the trainer may still change it.
    """
    if all(intervention.function is not None for intervention in interventions):
        return args
    changed = copy.copy(args)
    for intervention in interventions:
        changed.learning_rate *= intervention.lr_factor
        changed.max_grad_norm = (
            changed.max_grad_norm if intervention.max_grad_norm is None else intervention.max_grad_norm
        )
    return changed


def refuse_what_cannot_be_trained(
    trainer: GRPOTrainer, policy: Policy, interventions: Sequence[Intervention], spelling: Spelling
) -> None:
    """Raise UserError if this trainer cannot train with one of the interventions. Called before training begins."""
    for intervention in interventions:
        this = spelling.interventions([intervention.name])
        if intervention.name == "keep_truncated":
            raise UserError(
                f"{this}: TRL's forward pass leaves truncated responses out, so they cannot be trained on: set "
                f"{spelling.setting('mask_truncated_completions', False)}"
            )
        if "reference" in intervention.needs and trainer.beta == 0 and not policy.has_reference:
            raise UserError(
                f"{this} needs a reference model, and full fine-tuning keeps none: set "
                f"{spelling.setting('beta', intervention.strength)}, for which TRL keeps one, or "
                f"{spelling.with_adapter}"
            )
        if "sampler" in intervention.needs and not (trainer.use_vllm or trainer.rollout_func):
            raise UserError(f"{this}: {NEEDS['sampler']}")
        if intervention.function is None and (trainer.optimizer is not None or trainer.is_deepspeed_enabled):
            raise UserError(
                f"{this}: the optimizer already exists, or is DeepSpeed's: set {spelling.name(intervention.trl)} "
                "instead"
            )
        if intervention.nothing_on_policy and steps_per_rollout(trainer.args) == 1:
            logger.warning(f"{this}: {RATIOS_ARE_ONE}: one optimizer step learns from each rollout")


class TrainedLoss:
    """The loss of a trainer with interventions.

    Args:
        trainer: The trainer.
        policy: Scores with the reference model, if an intervention needs it and TRL does not.
        interventions: Applied in this order. Those that only change the optimizer's settings are ignored here.
        spelling: Names settings in advice.

    Raises:
        UserError: If the trainer cannot train with one of the interventions.
    """

    def __init__(
        self, trainer: GRPOTrainer, policy: Policy, interventions: Sequence[Intervention], spelling: Spelling
    ) -> None:
        refuse_what_cannot_be_trained(trainer, policy, interventions, spelling)
        self._trainer = trainer
        self._policy = policy
        self._spelling = spelling
        # Those that change the loss.
        self.interventions = [intervention for intervention in interventions if intervention.function is not None]
        self._zero_advantage_share = 0.0  # share of the rollout's prompts whose advantages are all 0

    @property
    def settings(self) -> LossSettings:
        """The settings of the loss that training uses, interventions included."""
        settings = loss_settings(self._trainer)
        return dataclasses.replace(
            settings, differs=settings.differs | {intervention.differs for intervention in self.interventions}
        )

    def begin_rollout(self, rollout: Rollout) -> None:
        """Register this rank's fresh rollout. Collective if there are interventions on the loss."""
        if self.interventions:
            self._zero_advantage_share = zero_advantage_share(
                rollout.advantages_of_tokens, rollout.prompt_index, all_ranks().reduce
            )

    def __call__(self, loss: Tensor, rollout: Rollout, scores: Scores, reference_logps: Tensor | None) -> Tensor:
        """Return a microbatch's loss with the gradient that the interventions ask for.

        Args:
            loss: The trainer's loss of the microbatch.
            rollout: Its sequences.
            scores: The scores from which the loss is computed, with graph.
            reference_logps: The reference model's log-probabilities, (B, T), if TRL computed them.
        """
        if not self.interventions:
            return loss
        c, d = torch.autograd.grad(loss, [scores.logps, scores.entropies], retain_graph=True, allow_unused=True)
        if reference_logps is None and any("reference" in intervention.needs for intervention in self.interventions):
            reference_logps = self._policy.reference_logps(rollout)
        inputs = microbatch_inputs(
            rollout,
            Scores(scores.logps.detach(), scores.entropies.detach(), scores.mask),
            LossWeights(c, d),
            loss_settings(self._trainer),  # before the interventions
            reference_logps,
            microbatches=self._trainer.current_gradient_accumulation_steps,
            zero_advantage_share=self._zero_advantage_share,
            responses_per_prompt=self._trainer.num_generations,
        )
        for intervention in self.interventions:
            inputs = dataclasses.replace(inputs, weights=self._weights(intervention, inputs))
        new = inputs.weights
        correction = ((new.logps - c) * scores.logps).sum()
        if new.entropies is not None:
            correction = correction + ((new.entropies if d is None else new.entropies - d) * scores.entropies).sum()
        return loss + correction - correction.detach()

    def _weights(self, intervention: Intervention, inputs: LossInputs) -> LossWeights:
        """Return the loss's weights, changed by the intervention. Raise UserError if it cannot change them."""
        if inputs.zero_advantage_share == 1.0 and "some_advantage" in intervention.needs:
            return inputs.weights  # all advantages are 0, so there is nothing to scale
        reason = intervention.unavailable_reason(inputs)
        if reason:
            raise UserError(f"{self._spelling.interventions([intervention.name])}: {reason}")
        return intervention.weights(inputs)
