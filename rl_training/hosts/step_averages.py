"""Averages over the responses of a step, for loops that log nothing themselves."""

from __future__ import annotations

import math

import torch

from rl_training.engine.step_result import StepResult
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.rollout import are_mixed, join_rollouts


def step_averages(result: StepResult) -> dict[str, float]:
    """Return a step's means over all ranks, under TRL's names, nan where unknown. Collective.

    Empty if the step was discarded.
    """
    if not result.rollouts:
        return {}
    rollout = join_rollouts(result.rollouts)
    lengths = rollout.completion_mask.sum(dim=1).double()
    rewards = torch.full_like(lengths, torch.nan) if rollout.rewards is None else rollout.rewards.to(lengths)
    group = rollout.prompt_index.cpu().unique(return_inverse=True)[1]
    rewards = rewards.cpu()  # a few numbers: on a GPU, every group below would cost a synchronization
    by_prompt = [rewards[group == g] for g in range(int(group.max()) + 1)]
    # A single response has no spread, and torch would warn about it.
    spreads = torch.stack([values.std() if len(values) > 1 else values.new_tensor(math.nan) for values in by_prompt])
    # Compared directly, because torch's standard deviation of equal numbers may not be exactly 0.
    are_equal = ~torch.stack([are_mixed(prompt_rewards) for prompt_rewards in by_prompt])
    parts = {
        "reward": rewards,
        "reward_std": spreads,
        "frac_reward_zero_std": are_equal.double().where(~spreads.isnan(), math.nan),
        "completions/mean_length": lengths,
        "entropy": torch.cat([scores.entropies[scores.mask.bool()] for scores in result.scores]).double(),
    }
    reduce = all_ranks().reduce
    totals = reduce(torch.stack([values.sum().to(lengths.device) for values in parts.values()]))
    counts = reduce(torch.tensor([len(v) for v in parts.values()], device=totals.device).double())
    return dict(zip(parts, (totals / counts).tolist(), strict=True))
