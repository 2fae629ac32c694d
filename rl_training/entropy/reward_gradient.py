"""The gradient of the mean reward, and the first-order change of reward by a step, leave-fold-out like `forward`.

    δ reward = Σ_k n_k J_k · δθ_(−k) / N         J_k is fold k's gradient of the mean reward

    J = 1/S Σ_i (r_i − mean of the n responses to its prompt) n/(n−1) ρ_i Σ_k ∂log π(t_ik)

The sum runs over the S responses that have a reward. If a prompt has only one of these, it has no baseline and
contributes 0. The factor n/(n−1) removes a response's own reward from its group's mean. ρ_i is the response's ratio to
the sampler, 1 if the policy itself sampled it.

Dr-GRPO's gradient is a multiple of J, so J then costs nothing. Whether the step's gradient is a multiple of J is
decided from the loss's weights alone: settings can be misleading, and users can bring their own loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.entropy.changed_steps import ChangedUpdates, Direction, solve_combination
from rl_training.optim.leave_one_out import LeaveOneOutUpdates
from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import centre_by_prompt
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.data import StepData
from rl_training.step.loss_weights import LossWeights
from rl_training.step.reasons import NO_OTHERS, NO_REWARDS, NO_SAMPLING_LOGPS

TOLERANCE = 1e-6  # squared distance, relative to the squared norm, within which weights count as multiples
OTHER_LOSS = Unavailable(
    "other_loss",
    "the loss is not just log-probabilities weighted by reward minus the prompt's mean reward (it has other weights, a "
    "KL term or an entropy bonus), so the step's gradient is not a multiple of the reward gradient",
)


def reward_gradient(step: StepData, ranks: Ranks) -> tuple[float | LossWeights | None, Unavailable | None]:
    """Return J, the gradient of the mean reward of a response, the cheapest way possible. Collective.

    Returns:
        J as a factor on the step's own gradient if it is a multiple of that, else as the weights of a loss that has it,
        None if it is unknown. Then the reason why it is no multiple, or None.
    """
    batch = step.batch
    advantages, reason = _advantages(batch, ranks)
    reason = reason or step.reasons.relative_rewards
    log_ratios = batch.log_ratios()
    if not reason and ranks.anywhere({"no ratios": log_ratios is None}, advantages.device)["no ratios"]:
        reason = NO_SAMPLING_LOGPS
    if reason or log_ratios is None:
        return None, reason
    weights = _token_weights(batch, advantages * log_ratios.sum(dim=1).exp())
    factor, reason = _step_gradient_factor(step, ranks, weights)
    return (weights if factor is None else factor), reason


def reward_multiple_reason(step: StepData, ranks: Ranks) -> Unavailable | None:
    """Return the reason why the step's gradient is not that of rewards minus their groups' means, or None. Collective.

    Ratios to a sampler are left out, so it does not matter which policy sampled the responses.
    """
    advantages, reason = _advantages(step.batch, ranks)
    return reason or _step_gradient_factor(step, ranks, _token_weights(step.batch, advantages))[1]


def _advantages(batch: Batch, ranks: Ranks) -> tuple[Tensor, Unavailable | None]:
    """Return (r_i − mean) n/(n−1) / S times the number of ranks, (B,), and why it is unknown or None. Collective.

    The factor is there because training's weights have it too: their gradients are averaged over ranks.
    """
    rollout = batch.rollout
    rewards = torch.full_like(rollout.prompt_index, torch.nan, dtype=torch.float64)
    if rollout.rewards is not None:
        rewards = rollout.rewards.double()
    centred, sizes = centre_by_prompt(rewards, rollout.prompt_index)
    has_reward = ~rewards.isnan()
    has_others = has_reward & (sizes > 1)
    counts = torch.stack([has_reward.sum(), has_others.sum(), has_reward.new_tensor(rollout.rewards is None)])
    num_rewards, num_with_others, num_unknown = ranks.reduce(counts.double()).tolist()
    if num_unknown or not num_with_others:
        return rewards, NO_REWARDS if num_unknown else NO_OTHERS
    return (centred * sizes / (sizes - 1.0)).where(has_others, 0.0) * (ranks.count / num_rewards), None


def _token_weights(batch: Batch, advantages: Tensor) -> LossWeights:
    weights = advantages.unsqueeze(1) * batch.scores.mask
    return LossWeights(weights.to(batch.scores.logps), None)


def _step_gradient_factor(
    step: StepData, ranks: Ranks, weights: LossWeights
) -> tuple[float | None, Unavailable | None]:
    """Return the factor that turns the step's gradient into that of `weights`, or None and the reason. Collective."""
    if step.reasons.other_terms:
        return None, step.reasons.other_terms
    batch = step.batch
    loss_vector, reward_vector = (table.stacked().double().flatten() for table in (batch.loss_weights, weights))
    loss_square, product, reward_square = ranks.reduce(
        torch.stack([loss_vector @ loss_vector, loss_vector @ reward_vector, reward_vector @ reward_vector])
    ).unbind()
    gram = torch.stack([torch.stack([loss_square, product]), torch.stack([product, reward_square])])
    tolerance = TOLERANCE + torch.finfo(batch.loss_weights.logps.dtype).eps ** 2  # the loss's weights may be bf16
    factors = solve_combination(gram, 1, [0], tolerance)
    if factors is not None:
        return factors[0], None
    return None, OTHER_LOSS.with_fix(step.fixes.dr_grpo)


def reward_products(
    fold_sizes: Tensor, updates: LeaveOneOutUpdates | None, factor: float | None
) -> tuple[Tensor, Tensor]:
    """Return n_k J_k · δθ_(−k) and Σ_{j≠l} n_j J_j · (δθ_(−l) − δθ) by fold, (K,) fp64 in host memory. Collective.

    Both are nan if J is not a multiple of the step's own gradient, or if no fold can be left out of the step.
    """
    if factor is None or updates is None:
        unknown = torch.full((len(fold_sizes),), torch.nan, dtype=torch.float64)
        return unknown, unknown
    direction = Direction(updates.gradient.by_fold, updates.gradient.mean, factor)
    ((fold_products, corrections),) = ChangedUpdates(updates).products([None], [direction])
    return fold_sizes * fold_products.squeeze(1), corrections.squeeze(1)
