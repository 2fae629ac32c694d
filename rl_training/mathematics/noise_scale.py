"""The gradient noise scale from square norms of gradients of blocks and of the whole batch. Pure functions.

With G the true mean gradient and Σ the covariance of one independent unit's gradient, B_simple = tr Σ / |G|² is the
batch size at which noise and signal are equal. From the mean gradients g_b of M blocks of b units, and g_B of all
B = M b of them,

    |G|²^ = (B |g_B|² − b mean|g_b|²) / (B − b)         tr Σ^ = (mean|g_b|² − |g_B|²) / (1/b − 1/B).

Both are unbiased, and |G|²^ may come out negative.

Source: McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.mathematics.jackknife import jackknife_stderr


def noise_moments(block_sq_norm: Tensor, batch_sq_norm: Tensor, block_size: float, batch_size: float) -> Tensor:
    """Returns the unbiased (tr Σ^, |G|²^), stacked in a new last dimension; the second may be negative.

    block_sq_norm  mean of |g_b|² over the blocks        block_size  b, units in a block
    batch_sq_norm  |g_B|²                                batch_size  B > b, units in all of them

    Without noise, |g_b|² = |g_B|² = 4 gives

    >>> noise_moments(torch.tensor(4.0), torch.tensor(4.0), block_size=2, batch_size=8)
    tensor([0., 4.])
    """
    trace = (block_sq_norm - batch_sq_norm) / (1.0 / block_size - 1.0 / batch_size)
    grad_sq_norm = (batch_size * batch_sq_norm - block_size * block_sq_norm) / (batch_size - block_size)
    return torch.stack([trace, grad_sq_norm], dim=-1)


def split_of_trace(same_prompt: Tensor, moments: Tensor, responses_per_prompt: int) -> Tensor:
    """Returns the unbiased parts (between, within) of tr Σ, which add up to it; either may be negative.

    same_prompt  c, the mean of r_i·r_j over pairs of responses of one prompt
    moments      (tr Σ^, |G|²^), as of `noise_moments`
    """
    trace, grad_sq_norm = moments.unbind(-1)
    square = (responses_per_prompt - 1) ** 2
    between = same_prompt * square / (square + 1) - grad_sq_norm
    return torch.stack([between, trace - between], dim=-1)


def weighted_ratio(history: Tensor, decay: float) -> tuple[Tensor, Tensor, float]:
    """Returns the averaged (tr Σ, |G|²), the jackknife errors of these and of their ratio (3,), the effective steps.

    history  (steps, 2), oldest first; the weight of a step is decay^age. Rows that are not finite are not counted.
    """
    ages = torch.arange(len(history) - 1, -1, -1, dtype=history.dtype)
    known = history.isfinite().all(dim=1)
    weights, rows = (decay**ages)[known], history[known]
    terms = torch.cat([weights.unsqueeze(1) * rows, weights.unsqueeze(1)], dim=1)

    def statistic(sums: Tensor) -> Tensor:
        trace, grad_sq_norm, weight = sums.unbind(-1)
        return torch.stack([trace / weight, grad_sq_norm / weight, trace / grad_sq_norm], dim=-1)

    sums = terms.sum(dim=0)
    stderr = jackknife_stderr(statistic, sums, sums - terms, reduce=lambda tensor: tensor)
    effective_steps = float(weights.sum() ** 2 / weights.square().sum()) if len(weights) else 0.0
    return statistic(sums)[:2], stderr, effective_steps
