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

# Old log-probabilities at most this many times as far away as two passes of the policy are its own.
DROPOUT_FACTOR = 1.5
ROWS = 32  # per rank, scored twice to measure the distance of two passes
SEED = 26  # for the masks of these passes; any seed but training's


class OldLogps:
    """Tells whose old log-probabilities the batch of the current rollout has.

    Args:
        policy: The policy that is trained.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # With dropout: whether they are the policy's own; otherwise each microbatch tells.
        self._are_own: bool | None = None

    def begin(self) -> None:
        """Begin a rollout."""
        self._are_own = None

    def compare(self, rollout: Rollout, hidden: Tensor) -> None:
        """Compare those of a whole rollout with two passes of a policy that has dropout. Collective.

        Args:
            rollout: This rank's sequences, with old log-probabilities.
            hidden: (B,), responses of which old log-probabilities were not computed.
        """
        self._are_own = _own_up_to_dropout(rollout, hidden, self._policy)

    def drop_own(self, rollout: Rollout, scores: Scores, hidden: Tensor) -> Rollout:
        """Return the microbatch with old log-probabilities only if they are another policy's.

        At the first step of a rollout, old log-probabilities equal the current policy's up to rounding and are dropped,
        unless a subclass has replaced them by another policy's: the microbatch is then off-policy. With dropout two
        passes of the policy itself differ, so `compare` has decided it over the whole rollout.

        Args:
            rollout: The microbatch.
            scores: Training's scores of it.
            hidden: (B,), responses that training did not score.
        """
        old_logps = rollout.old_logps
        if not rollout.on_policy or old_logps is None:
            return rollout
        is_scored = rollout.completion_mask.bool() & ~hidden.unsqueeze(1)
        is_own = self._are_own
        if is_own is None:
            is_own = _own_up_to_rounding(scores.logps, old_logps, is_scored, self._policy)
        if not is_own:
            return dataclasses.replace(rollout, on_policy=False)
        engine_logps = None if rollout.sampling_logps is old_logps else rollout.sampling_logps
        return dataclasses.replace(rollout, old_logps=None, sampling_logps=engine_logps)


def _own_up_to_rounding(logps: Tensor, old_logps: Tensor, is_scored: Tensor, policy: Policy) -> bool:
    """Return whether old log-probabilities, (B, T), are the policy's own, for a policy without dropout.

    Args:
        logps: Training's, (B, T).
        old_logps: The batch's, (B, T).
        is_scored: The tokens that have both, (B, T) bool.
        policy: The policy that is trained.
    """
    return not is_scored.any() or float(_differences(logps, old_logps, is_scored).mean()) <= _tolerance(policy)


def _own_up_to_dropout(rollout: Rollout, hidden: Tensor, policy: Policy) -> bool:
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
    distances = [_differences(draws[0], others, is_scored).sum() for others in (rollout.old_logps, draws[1])]
    sums = torch.stack([*distances, is_scored.sum().to(distances[0])])
    distance, noise, count = all_ranks().reduce(sums).tolist()
    return distance <= _tolerance(policy) * count + DROPOUT_FACTOR * noise


def _tolerance(policy: Policy) -> float:
    return SAME_SCORES_ROUNDED if policy.scorer.training_rounding else SAME_SCORES


def _differences(some: Tensor, others: Tensor, is_token: Tensor) -> Tensor:
    """Return the absolute differences of the tokens' log-probabilities, (tokens,), in nats."""
    return (some.detach() - others)[is_token].double().abs()
