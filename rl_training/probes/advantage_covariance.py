"""The covariance of log-probability and advantage, a predictor of how entropy changes. Pure functions.

For a softmax policy over single actions, if every logit moves by η A(a) (natural policy gradient),

    dH/dη = −Cov_{a~π}(log π(a), A(a))                 exact at η = 0

So entropy falls if likely actions are rewarded. For language models the same covariance is taken over the tokens of a
batch, each with its response's advantage. That is a heuristic: tokens share weights, the optimizer is not the natural
gradient, momentum and step size are ignored, and the scale is unknown. The unit is nats per unit of η, so only the
correlation with measured changes is meaningful.

    per token       −Cov of log π(t_ik) and A_i, over all tokens of the batch
    per sequence    −Cov of S_i = Σ_k log π(t_ik) and A_i, over all sequences of the batch

Both are centred by means over the WHOLE batch, across microbatches and ranks. Centring within microbatches would drop
the differences between them, and the result would depend on their size.

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(arXiv 2505.22617), theorems 1 and 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.policy.scores import Scores


def covariance_terms(scores: Scores, advantages: Tensor) -> Tensor:
    """Return each sequence's terms of the covariance: count, Σx, Σy and Σxy with x = log π, y = A.

    Args:
        scores: Scores of the sequences.
        advantages: Per sequence, (B,), or per token, (B, T). A sequence's advantage is then the mean over its tokens.

    Returns:
        (B, 2, 4) fp64: row 0 sums over the sequence's tokens, row 1 takes the sequence as one value. Sum over sequences
        to get the input of `minus_covariance`.
    """
    exact = scores.exact()
    token_advantages = advantages.double().view(len(advantages), -1)
    logp_sum = exact.logps.sum(dim=1)
    length = exact.mask.sum(dim=1)
    advantage_sum = (token_advantages * exact.mask).sum(dim=1)
    advantage = token_advantages[:, 0] if token_advantages.shape[1] == 1 else advantage_sum / length.clamp(min=1.0)
    token_sums = torch.stack([length, logp_sum, advantage_sum, (token_advantages * exact.logps).sum(dim=1)], dim=1)
    sequence_sums = torch.stack([torch.ones_like(length), logp_sum, advantage, logp_sum * advantage], dim=1)
    return torch.stack([token_sums, sequence_sums], dim=1)


def minus_covariance(sums: Tensor) -> Tensor:
    """Return −Cov(log π, A) = Σx Σy/n² − Σxy/n, per token and per sequence. Positive: entropy is predicted to rise.

    Args:
        sums: Sums of `covariance_terms` over sequences, (..., 2, 4).

    Returns:
        (..., 2), in nats per unit of η.

    >>> scores = Scores(torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]]))
    >>> sums = covariance_terms(scores, torch.tensor([0.5, -1.0])).sum(dim=0)
    >>> minus_covariance(sums)  # tokens (−1, ½), (−2, ½), (−3, −1): −1.5/3; both sequences have S = −3
    tensor([-0.5000,  0.0000], dtype=torch.float64)
    """
    count, x, y, xy = sums.unbind(dim=-1)
    return x * y / count.square() - xy / count
