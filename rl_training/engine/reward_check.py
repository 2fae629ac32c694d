"""Detect rewards that are relative to their group: whitened, ranked, or compared with the group's best.

Their mean is the same in every group whatever the policy does, so no step changes it, and an estimate of its change
would be that of another quantity. The rewards of a step show it: all groups have one mean, although rewards differ
within groups. By chance this has at most the probability

    q^(M − 1)        M groups with different rewards, q the largest share of one value among their rewards,

because, given the others, a group's last reward must have one certain value. Discrete rewards and few groups make it
likely at a single step, so the probabilities of consecutive such steps are multiplied. Groups that were chosen by their
rewards (`Rollout.untested`) say nothing: of two responses with rewards 0 and 1, all groups that differ have one mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import Rollout, centre_by_prompt
from rl_training.statistics.unavailable import Unavailable

MAX_CHANCE = 1e-6  # probability of equal means by chance, below which rewards count as relative
TOLERANCE = 1e-5  # relative to the largest reward: rewards in fp32, minus a mean, then divided by a spread
RELATIVE_REWARDS = Unavailable(
    "relative_rewards",
    "the responses to every prompt have the same mean reward, as rewards relative to their group have (whitened, "
    "ranked): no step can change it",
    fix="return rewards that do not depend on the other responses; advantages subtract the group's mean anyway",
)


class RewardCheck:
    """Compares the groups' mean rewards at each measured step.

    Args:
        log_chance: Log probability that the latest consecutive steps with equal means are chance.
    """

    def __init__(self, log_chance: float = 0.0) -> None:
        self.log_chance = log_chance

    def check(self, rollout: Rollout, ranks: Ranks) -> Unavailable | None:
        """Return the reason why rewards count as relative to their group, or None; the same on every rank. Collective.

        Args:
            rollout: All sequences of the step on this rank, with all responses to each of its prompts. Rewards are
                known on all ranks or on none.
        """
        if rollout.rewards is None:
            return None
        num_groups, share, low, high, largest, untested = ranks.gather(_local_summary(rollout)).cpu().unbind(dim=1)
        if num_groups.any() and not untested.any():
            is_equal = bool(high.max() - low.min() <= TOLERANCE * largest.max())
            chance = (float(num_groups.sum()) - 1.0) * math.log(float(share.max()))
            self.log_chance = self.log_chance + chance if is_equal else 0.0
        return self.reason

    @property
    def reason(self) -> Unavailable | None:
        """The reason why rewards count as relative to their group by the steps so far, or None."""
        return RELATIVE_REWARDS if self.log_chance < math.log(MAX_CHANCE) else None


def _local_summary(rollout: Rollout) -> Tensor:
    """Return this rank's M, q, smallest and largest mean of a group, largest |reward|, and 1 if untested, (6,) fp64."""
    assert rollout.rewards is not None
    rewards = rollout.rewards.double()
    centred, sizes = centre_by_prompt(rewards, rollout.prompt_index)
    is_known = ~rewards.isnan() & (sizes > 1)
    largest = rewards[is_known].abs().amax() if is_known.any() else rewards.new_zeros(())
    tolerance = TOLERANCE * largest
    differs = is_known & (centred.abs() > tolerance)
    differing_groups = rollout.prompt_index[differs].unique()
    in_group = is_known & torch.isin(rollout.prompt_index, differing_groups)
    values = rewards[in_group].sort().values
    window = sizes.max() * tolerance
    counts = torch.searchsorted(values, values + window, right=True) - torch.searchsorted(values, values - window)
    share = counts.amax() / len(values) if len(values) else rewards.new_zeros(())
    means = (rewards - centred)[is_known]
    low = means.amin() if len(means) else rewards.new_tensor(math.inf)
    high = means.amax() if len(means) else rewards.new_tensor(-math.inf)
    num_groups = rewards.new_tensor(len(differing_groups))
    return torch.stack([num_groups, share.double(), low, high, largest, rewards.new_tensor(rollout.untested)])
