"""Training with interventions: the functions that predict their effect also give each microbatch's loss its weights.

    loss + Σ_ik (c' − c)_ik log π(t_ik) + (d' − d)_ik h_ik          c', d' held fixed

has the gradient of the weights c' and d' that the functions return, one after another, where the trainer's own loss
has c and d. Its value, which is logged, stays that of the trainer's own loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.engine.batch import Rollout
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.policy import Policy
from rl_training.hosts.processes import all_ranks
from rl_training.hosts.trl import batches
from rl_training.interventions import remedies
from rl_training.interventions.loss import LossInputs, of_microbatch, silent_share
from rl_training.interventions.named import RATIOS_ARE_ONE, Intervention
from rl_training.mathematics.scores import Scores

logger = logging.get_logger(__name__)

OF_OPTIMIZER = (remedies.lr, remedies.max_grad_norm)


class RemediedLoss:
    """The loss of a trainer with these interventions on it.

    ValueError, before anything is trained, for one that this trainer cannot train with. An intervention on learning
    rates or on clipping changes the trainer's arguments, here and once.
    """

    def __init__(self, trainer: GRPOTrainer, policy: Policy, which: Sequence[Intervention]) -> None:
        self._trainer, self._policy = trainer, policy
        self.on_loss = [of for of in which if of.remedy.function not in OF_OPTIMIZER]
        self._silent_share = 0.0  # of the rollout's prompts
        for of in which:
            if of.remedy.function is remedies.keep_truncated:
                raise ValueError(
                    f"intervention={of.name}: TRL's forward pass leaves truncated responses out, so they cannot be "
                    "trained on: set trainer.mask_truncated_completions=false"
                )
            if "reference" in of.remedy.needs and trainer.beta == 0 and not self._policy.has_reference:
                raise ValueError(
                    f"intervention={of.name} needs a reference model, and full fine-tuning keeps none: set "
                    f"trainer.beta={of.strength:g}, for which TRL keeps one, or use adapter=lora"
                )
            if of.remedy.function in OF_OPTIMIZER and (trainer.optimizer is not None or trainer.is_deepspeed_enabled):
                raise ValueError(
                    f"intervention={of.name}: the optimizer already exists, or is DeepSpeed's: set "
                    f"trainer.{of.remedy.trl} instead"
                )
            if of.remedy.nothing_on_policy and batches.steps_per_rollout(trainer.args) == 1:
                logger.warning(f"intervention={of.name}: {RATIOS_ARE_ONE}: one optimizer step learns from each rollout")
            if of.remedy.function is remedies.lr:
                trainer.args.learning_rate *= of.strength
            elif of.remedy.function is remedies.max_grad_norm:
                trainer.args.max_grad_norm = of.strength

    @property
    def differs(self) -> frozenset[str]:
        """How they change the loss, see LossSettings: by a term on log-probabilities other than the advantage's."""
        return frozenset(
            "entropy_coef"
            if of.remedy.function is remedies.bonus
            else ("intervention" if "advantages" in of.remedy.needs else "beta")
            for of in self.on_loss
        )

    def begin(self, rollout: Rollout) -> None:
        """Registers a fresh rollout of this rank. A collective."""
        if self.on_loss:
            self._silent_share = silent_share(rollout.advantages, rollout.prompt_index, all_ranks().reduce)

    def __call__(self, loss: Tensor, rollout: Rollout, scores: Scores, reference_logps: Tensor | None) -> Tensor:
        """Returns the loss of a microbatch, made of these scores, with the gradient that the interventions ask for."""
        if not self.on_loss:
            return loss
        c, d = torch.autograd.grad(loss, [scores.logps, scores.entropies], retain_graph=True, allow_unused=True)
        if reference_logps is None and any("reference" in of.remedy.needs for of in self.on_loss):
            reference_logps = self._policy.reference_logps(rollout)
        seen = Scores(scores.logps.detach(), scores.entropies.detach(), scores.mask)
        settings = batches.loss_settings(self._trainer)
        known = dataclasses.replace(
            of_microbatch(rollout, seen, LossWeights(c, d), settings, reference_logps),
            microbatches=self._trainer.current_gradient_accumulation_steps,
            silent_share=self._silent_share,
        )
        for of in self.on_loss:
            known = dataclasses.replace(known, weights=_weights(of, known))
        new = known.weights
        further = ((new.logps - c) * scores.logps).sum()
        if new.entropies is not None:
            further = further + ((new.entropies if d is None else new.entropies - d) * scores.entropies).sum()
        return loss + further - further.detach()


def _weights(of: Intervention, known: LossInputs) -> LossWeights:
    """Returns the loss weights changed by the intervention. ValueError where it cannot change them."""
    if known.silent_share == 1.0 and "some_advantage" in of.remedy.needs:
        return known.weights  # there is nothing to scale
    why = of.why_none(known)
    if why:
        raise ValueError(f"intervention={of.name}: {why}")
    remedied = of(known)
    if remedied.lr_factor != 1.0 or remedied.max_grad_norm is not None:
        raise ValueError(
            f"intervention={of.name} returned another learning rate or threshold: set those once, by lr:FACTOR and "
            "max_grad_norm:NORM"
        )
    return remedied.weights or known.weights
