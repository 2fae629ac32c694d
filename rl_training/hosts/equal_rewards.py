"""Tells a step of which nothing is learned, because all responses have earned the same, and what can be seen of why.

It is the commonest first contact with a task that is too hard: all rewards are 0, and so is all that is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import Rollout

NO_ADVANTAGE = 1e-4  # rewards less their own mean may differ from 0 by rounding, and be divided by so small a spread
OFTEN = 0.5  # share of responses cut off from which on that is named as a cause


def equal_rewards_warning(rollouts: Sequence[Rollout], ranks: Ranks, longer_responses: str) -> str:
    """Return a sentence if all responses of a step, on all ranks, have the same reward and no advantage. A collective.

    Args:
        rollouts: The microbatches of the step on this rank, at least one.
        longer_responses: What to do so that responses may be longer.

    Returns:
        The sentence; "" where rewards differ or are not known, or where a loop has advantages of another baseline.
    """
    table = ranks.gather(_facts(rollouts)).cpu()
    least, most, advantage = float(table[:, 0].min()), float(table[:, 1].max()), float(table[:, 2].max())
    count, cut_off, longest = int(table[:, 3].sum()), float(table[:, 4].sum()), int(table[:, 5].max())
    if table.isnan()[:, :3].any() or not math.isclose(least, most) or advantage > NO_ADVANTAGE:
        return ""
    sentence = f"all {count} responses earned {least:g}, so every advantage is 0 and nothing is learned from them. "
    if cut_off >= OFTEN * count:  # False where it is not known
        return (
            f"{sentence}{100 * cut_off / count:.0f}% of them were cut off, the longest at {longest} tokens: "
            f"{longer_responses}"
        )
    return f"{sentence}Prompts of another difficulty, or a reward for a part of the answer, would give a signal"


def _facts(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return least and greatest reward, greatest advantage, number of responses, of those cut off, and longest."""
    rewards = torch.cat([_or_unknown(rollout.rewards, rollout) for rollout in rollouts])
    cut_off = torch.cat([_or_unknown(rollout.truncated, rollout) for rollout in rollouts])
    advantages = torch.cat([rollout.advantages_of_tokens.abs().amax(dim=1).double() for rollout in rollouts])
    lengths = torch.cat([rollout.token_mask.sum(dim=1).double() for rollout in rollouts])
    count = torch.full_like(lengths[0], len(lengths))
    return torch.stack([rewards.min(), rewards.max(), advantages.max(), count, cut_off.sum(), lengths.max()])


def _or_unknown(values: torch.Tensor | None, rollout: Rollout) -> torch.Tensor:
    return torch.full_like(rollout.advantages.double(), math.nan) if values is None else values.double()
