"""Tell whether a batch's old log-probabilities are those of the policy that is trained, or another policy's.

TRL computes them itself in some configurations, and a subclass may replace them by those of the policy that sampled. At
a rollout's first step, the policy's own equal training's scores up to rounding. With dropout, they also differ by what
two passes of the policy differ by, which is measured over a whole rollout: a microbatch may have a few tokens only.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rl_training.parallel.ranks import all_ranks
from rl_training.policy.policy import Policy
from rl_training.policy.precision import SAME_SCORES, SAME_SCORES_ROUNDED
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import Rollout, take_rows
from rl_training.policy.scores import Scores

# With dropout, two passes of the policy lie some distance apart. Old log-probabilities that lie at most this many times
# that distance away are the policy's own.
DROPOUT_FACTOR = 1.5
ROWS = 32  # per rank, scored twice to measure the distance of two passes
SEED = 26  # for the masks of these passes; any seed but training's


def without_own_logps(
    rollout: Rollout, scores: Scores, hidden: Tensor, policy: Policy, has_own: bool | None
) -> Rollout:
    """Return a microbatch with old log-probabilities only if they are another policy's.

    At the first step of a rollout, old log-probabilities equal the current policy's up to rounding and are dropped,
    unless a subclass has replaced them by another policy's: the microbatch is then off-policy. With dropout two passes
    of the policy itself differ, so `are_own_up_to_dropout` has decided it for the whole rollout.

    Args:
        rollout: The microbatch.
        scores: Training's scores of it.
        hidden: (B,), responses that training did not score.
        policy: The policy that is trained.
        has_own: Whether the rollout's old log-probabilities are the policy's own. None if this microbatch tells.
    """
    old_logps = rollout.old_logps
    if not rollout.on_policy or old_logps is None:
        return rollout
    is_scored = rollout.completion_mask.bool() & ~hidden.unsqueeze(1)
    if has_own is None:
        has_own = _are_own_up_to_rounding(scores.logps, old_logps, is_scored, policy)
    if not has_own:
        return dataclasses.replace(rollout, on_policy=False)
    engine_logps = None if rollout.sampling_logps is old_logps else rollout.sampling_logps
    return dataclasses.replace(rollout, old_logps=None, sampling_logps=engine_logps)


def _are_own_up_to_rounding(logps: Tensor, old_logps: Tensor, is_scored: Tensor, policy: Policy) -> bool:
    """Return whether old log-probabilities, (B, T), are the policy's own, for a policy without dropout.

    Args:
        logps: Training's, (B, T).
        old_logps: The batch's, (B, T).
        is_scored: The tokens that have both, (B, T) bool.
        policy: The policy that is trained.
    """
    return not is_scored.any() or float(_differences(logps, old_logps, is_scored).mean()) <= _tolerance(policy)


def are_own_up_to_dropout(rollout: Rollout, hidden: Tensor, policy: Policy) -> bool:
    """Return whether a fresh rollout's old log-probabilities are the policy's own, up to dropout. Collective.

    Args:
        rollout: This rank's sequences, with old log-probabilities.
        hidden: (B,), responses of which old log-probabilities were not computed.
        policy: The policy that is trained, with the weights that the old log-probabilities are meant to be of.
    """
    rows = torch.arange(min(ROWS, rollout.num_sequences), device=hidden.device)
    rollout = take_rows(rollout, rows)
    draws = []
    for number in range(2):
        with preserve_rng(hidden.device):
            seed_torch(SEED, number, device=hidden.device)
            draws.append(policy.score_rollout(rollout, as_training=True, dropout=True).logps)
    assert rollout.old_logps is not None
    is_scored = rollout.completion_mask.bool() & ~hidden[rows].unsqueeze(1)
    distance_of_old = _differences(draws[0], rollout.old_logps, is_scored).sum()
    distance_of_passes = _differences(draws[0], draws[1], is_scored).sum()
    sums = torch.stack([distance_of_old, distance_of_passes, is_scored.sum().to(distance_of_old)])
    distance, noise, count = all_ranks().reduce(sums).tolist()
    return distance <= _tolerance(policy) * count + DROPOUT_FACTOR * noise


def _tolerance(policy: Policy) -> float:
    return SAME_SCORES_ROUNDED if policy.scorer.training_rounding else SAME_SCORES


def _differences(logps: Tensor, other_logps: Tensor, is_token: Tensor) -> Tensor:
    """Return by how much the tokens' log-probabilities differ, (tokens,), in nats, without sign.

    Args:
        logps: Log-probabilities, (B, T).
        other_logps: Those of another pass or policy, (B, T).
        is_token: The tokens to compare, (B, T) bool.
    """
    return (logps.detach() - other_logps)[is_token].double().abs()
