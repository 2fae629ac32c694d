"""Averages of a step that every loop logs, whatever its probes: reward, length, entropy, under TRL's names."""

from __future__ import annotations

import torch

from rl_training.engine.batch import join_rollouts
from rl_training.engine.open_step import OpenStep
from rl_training.engine.step import Ranks


def step_averages(step: OpenStep, ranks: Ranks) -> dict[str, float]:
    """Returns the means of a step over all ranks, nan for what is not known. A collective."""
    rollout = join_rollouts(step.rollouts)
    lengths = rollout.completion_mask.sum(dim=1).double()
    rewards = torch.full_like(lengths, torch.nan) if rollout.rewards is None else rollout.rewards.to(lengths)
    group = rollout.prompt_index.unique(return_inverse=True)[1]
    spreads = torch.stack([rewards[group == g].std() for g in range(int(group.max()) + 1)])
    parts = {
        "reward": rewards,
        "reward_std": spreads,
        "frac_reward_zero_std": torch.where(spreads.isnan(), spreads, (spreads == 0).double()),
        "completions/mean_length": lengths,
        "entropy": torch.cat([scores.entropies[scores.mask.bool()] for scores in step.scores]).double(),
    }
    totals = ranks.reduce(torch.stack([values.sum() for values in parts.values()]))
    counts = ranks.reduce(torch.tensor([len(v) for v in parts.values()], device=totals.device).double())
    return dict(zip(parts, (totals / counts).tolist(), strict=True))
