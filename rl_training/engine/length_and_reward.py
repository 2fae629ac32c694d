"""What a step does to length and reward to first order, leave-fold-out like `forward`, from what is there for entropy.

length  Σ_k n_k ∂E[T]_k · δθ_(−k) / N     X per sequence less X per token is H_tok ∂E[T]: no further backward
reward  Σ_k n_k J_k · δθ_(−k) / N         J_k = −g_k L G/(G−1) is the gradient of the mean reward in Dr-GRPO: the
                                          step's own, without a response's reward in its group's mean
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.engine.changed_steps import ChangedSteps, Direction
from rl_training.engine.entropy_gradients import log_ratios
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.step import Step
from rl_training.engine.updates import StepsWithoutFolds
from rl_training.mathematics.folds import over_the_others

NO_REWARD = "the step's own gradient is that of the reward in Dr-GRPO's loss only, on the policy's fresh responses"


def reward_factor(step: Step) -> float | None:
    """Returns J as a multiple of the step's own gradient; None where it is none."""
    batch, group = step.batch, step.batch.responses_per_prompt
    own_sample = batch.rollout.on_policy and batch.rollout.sampling_logps is None
    if not own_sample or step.capabilities.not_dr_grpo or batch.loss_settings is None:
        return None
    return -batch.loss_settings.max_length * group / (group - 1)


def reward_products(step: Step, steps: StepsWithoutFolds | None) -> Tensor:
    """Returns n_k J_k · δθ_(−k) of each fold, and Σ_{j≠l} n_j J_j · (δθ_(−l) − δθ) without each, (F, 2) fp64.

    A collective. nan where J is not the step's own gradient, and without steps.
    """
    factor = reward_factor(step)
    if factor is None or steps is None:
        return torch.full((step.num_folds, 2), torch.nan, dtype=torch.float64)
    direction = Direction(steps.gradient.rows, steps.gradient.mean, factor)
    ((own, lost),) = ChangedSteps(steps, step.ranks.reduce).products([None], [direction])
    return torch.cat([step.fold_sizes.unsqueeze(1) * own, lost], dim=1)


def reward_gradient(step: Step) -> float | LossWeights | None:
    """Returns J, the gradient of the mean reward: a multiple of the step's own in Dr-GRPO, else by its loss's weights.

    None where the rewards are unknown. A response's own reward is in its group's mean: hence the factor G / (G − 1).
    Responses of another sampler are weighed by their ratios.
    """
    batch, group, factor = step.batch, step.batch.responses_per_prompt, reward_factor(step)
    if factor is not None:
        return factor
    rewards, mask = batch.rollout.rewards, batch.scores.mask
    if rewards is None:
        return None
    advantages, logs = over_the_others(rewards, batch.rollout.prompt_index), log_ratios(batch)
    if logs is None:
        return None
    weights = (advantages * logs.sum(dim=1).exp()).unsqueeze(1) * mask * (group / (group - 1) / len(mask))
    return LossWeights(weights.to(batch.scores.logps), None)
