"""Detects a step with zero advantage, in which all responses earned the same reward, and suggests a cause.

It is the commonest first sign of a task that is too hard: all rewards are 0, and so are all estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import Rollout, are_mixed

# Largest advantage that counts as 0: rewards minus their mean may be off by rounding, then divided by a tiny spread.
ADVANTAGE_TOLERANCE = 1e-4
CUT_OFF_SHARE = 0.5  # smallest share of truncated responses for which truncation is named as the cause


def equal_rewards_warning(rollouts: Sequence[Rollout], ranks: Ranks, longer_responses: str) -> str:
    """Return a warning if all responses of a step, on all ranks, have the same reward and no advantage. Collective.

    Args:
        rollouts: The microbatches of the step on this rank, at least one.
        longer_responses: The advice that lets responses get longer, such as a setting to raise.

    Returns:
        The warning. Empty if rewards differ or are unknown, or if another baseline gives nonzero advantages.
    """
    summaries = ranks.gather(_local_summary(rollouts)).cpu()
    smallest, largest, advantages, counts, numbers_cut_off, longest_responses = summaries.unbind(dim=1)
    is_known = not torch.stack([smallest, largest, advantages]).isnan().any()
    are_equal = not are_mixed(torch.cat([smallest, largest]))
    if not (is_known and are_equal and float(advantages.max()) <= ADVANTAGE_TOLERANCE):
        return ""
    least, longest = float(smallest.min()), int(longest_responses.max())
    count, cut_off = int(counts.sum()), float(numbers_cut_off.sum())
    sentence = f"all {count} responses earned {least:g}, so every advantage is 0 and nothing is learned from them. "
    if cut_off >= CUT_OFF_SHARE * count:  # False if unknown: cut_off is then nan
        return (
            f"{sentence}{100 * cut_off / count:.0f}% of them were cut off, the longest at {longest} tokens: "
            f"{longer_responses}"
        )
    return f"{sentence}Easier or harder prompts, or partial rewards, would give a signal"


def _local_summary(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return six numbers: smallest and largest reward, largest |advantage|, responses, responses cut off, longest."""
    rewards = torch.cat([_or_nan(rollout.rewards, rollout) for rollout in rollouts])
    cut_off = torch.cat([_or_nan(rollout.truncated, rollout) for rollout in rollouts])
    advantages = torch.cat([rollout.advantages_of_tokens.abs().amax(dim=1).double() for rollout in rollouts])
    lengths = torch.cat([rollout.token_mask.sum(dim=1).double() for rollout in rollouts])
    count = torch.full_like(lengths[0], len(lengths))
    return torch.stack([rewards.min(), rewards.max(), advantages.max(), count, cut_off.sum(), lengths.max()])


def _or_nan(values: torch.Tensor | None, rollout: Rollout) -> torch.Tensor:
    return torch.full_like(rollout.advantages.double(), math.nan) if values is None else values.double()
