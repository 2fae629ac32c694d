"""Tell whether a batch's old log-probabilities are those of the policy that is trained, or another policy's.

TRL computes them itself in some configurations, and a subclass may replace them by those of the policy that sampled. At
a rollout's first step, the policy's own equal training's scores up to rounding. With dropout, they also differ by what
two passes of the policy differ by, which is measured over a whole rollout: a microbatch may have a few tokens only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.parallel.ranks import all_ranks
from rl_training.policy.policy import Policy
from rl_training.policy.precision import SAME_SCORES, SAME_SCORES_ROUNDED
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import Rollout, take_rows

# Old log-probabilities at most this many times as far away as two passes of the policy are its own.
DROPOUT_FACTOR = 1.5
ROWS = 32  # per rank, scored twice to measure the distance of two passes
SEED = 26  # for the masks of these passes; any seed but training's


def own_up_to_rounding(logps: Tensor, old_logps: Tensor, is_scored: Tensor, policy: Policy) -> bool:
    """Return whether old log-probabilities, (B, T), are the policy's own, for a policy without dropout.

    Args:
        logps: Training's, (B, T).
        old_logps: The batch's, (B, T).
        is_scored: The tokens that have both, (B, T) bool.
        policy: The policy that is trained.
    """
    return not is_scored.any() or float(_differences(logps, old_logps, is_scored).mean()) <= _tolerance(policy)


def own_up_to_dropout(rollout: Rollout, hidden: Tensor, policy: Policy) -> bool:
    """Return whether a fresh rollout's old log-probabilities are the policy's own, up to dropout. Collective.

    Args:
        rollout: This rank's sequences, with old log-probabilities.
        hidden: (B,), responses of which old log-probabilities were not computed.
        policy: The policy that is trained, with the weights that the old log-probabilities are meant to be of.
    """
    rows = torch.arange(min(ROWS, rollout.num_sequences), device=hidden.device)
    rollout, draws = take_rows(rollout, rows), []
    for number in range(2):
        with preserve_rng(hidden.device):
            seed_torch(SEED, number, device=hidden.device)
            draws.append(policy.score_rollout(rollout, as_training=True, dropout=True).logps)
    assert rollout.old_logps is not None
    is_scored = rollout.completion_mask.bool() & ~hidden[rows].unsqueeze(1)
    distances = [_differences(draws[0], others, is_scored).sum() for others in (rollout.old_logps, draws[1])]
    sums = torch.stack([*distances, is_scored.sum().to(distances[0])])
    distance, noise, count = all_ranks().reduce(sums).tolist()
    return distance <= _tolerance(policy) * count + DROPOUT_FACTOR * noise


def _tolerance(policy: Policy) -> float:
    return SAME_SCORES_ROUNDED if policy.scorer.training_rounding else SAME_SCORES


def _differences(some: Tensor, others: Tensor, is_token: Tensor) -> Tensor:
    """Return the absolute differences of the tokens' log-probabilities, (tokens,), in nats."""
    return (some.detach() - others)[is_token].double().abs()
