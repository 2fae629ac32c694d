"""The covariance of log-probability and advantage, a predictor of how entropy changes. Pure functions.

For a softmax policy over single actions whose logits each move by η A(a) (natural policy gradient),

    dH/dη = −Cov_{a~π}(log π(a), A(a))                 exact at η = 0

The entropy falls where likely actions are rewarded. In language models the same covariance is taken over the tokens of
a batch, each with its response's advantage. That is a heuristic: weights are shared between tokens, the optimizer is
not the natural gradient, it ignores momentum and step size, and its scale is unknown. It is in nats per unit of η;
only its correlation with measured changes means something.

    per token       −Cov over all tokens of the batch of log π(t_ik) and A_i
    per sequence    −Cov over its sequences of S_i = Σ_k log π(t_ik) and A_i

Both are centred by means over the WHOLE batch, all microbatches and processes. Centring within microbatches would drop
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
        scores: of the sequences.
        advantages: (B,), or (B, T) for each token; a sequence's advantage is then their mean.

    Returns:
        (B, 2, 4) fp64: row 0 over the sequence's tokens, row 1 over the sequence as one value. Sums over sequences are
        the input of `minus_covariance`.
    """
    exact = scores.exact()
    of_tokens = advantages.double().view(len(advantages), -1)
    logp = exact.logps.sum(dim=1)
    length = exact.mask.sum(dim=1)
    over_tokens = (of_tokens * exact.mask).sum(dim=1)
    advantage = of_tokens[:, 0] if of_tokens.shape[1] == 1 else over_tokens / length.clamp(min=1.0)
    token_sums = torch.stack([length, logp, over_tokens, (of_tokens * exact.logps).sum(dim=1)], dim=1)
    sequence_sums = torch.stack([torch.ones_like(length), logp, advantage, logp * advantage], dim=1)
    return torch.stack([token_sums, sequence_sums], dim=1)


def minus_covariance(sums: Tensor) -> Tensor:
    """Return −Cov(log π, A) = Σx Σy/n² − Σxy/n, per token and per sequence. Positive: entropy is predicted to rise.

    Args:
        sums: (..., 2, 4), sums of `covariance_terms` over sequences.

    Returns:
        (..., 2), in nats per unit of η.

    >>> scores = Scores(torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]]))
    >>> sums = covariance_terms(scores, torch.tensor([0.5, -1.0])).sum(dim=0)
    >>> minus_covariance(sums)  # tokens (−1, ½), (−2, ½), (−3, −1): −1.5/3; both sequences have S = −3
    tensor([-0.5000,  0.0000], dtype=torch.float64)
    """
    count, x, y, xy = sums.unbind(dim=-1)
    return x * y / count.square() - xy / count
