"""KL divergence between two next-token distributions at each position, exact over the vocabulary.

    KL_k = Σ_v p_k(v) (log p_k(v) − log q_k(v))                     nats

Averaged over responses sampled from p, Σ_k KL_k is an unbiased estimate of the divergence between the distributions
of whole responses: by the chain rule, KL(p‖q) = E[Σ_k KL_k]. It is less noisy than the sampled tokens' log ratios,
Σ_k log p(t_k) − log q(t_k), because each position's token is averaged out exactly.

Let x be the logits of p, c = x − max x and Z = Σ_v e^c_v, with c' and Z' the same for q. Then

    KL_k = Σ_v e^c_v (c_v − c'_v) / Z − log Z + log Z'

Terms are computed in the precision of the logits, sums over the vocabulary in fp64. For fp32 logits the result is
within 1e-7 nats of an fp64 computation, whose exponentials are slow on most GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ENTRIES = 2**22  # entries of the (positions, vocabulary) tensors held at once


def kl_divergences(logits: Tensor, reference: Tensor) -> Tensor:
    """Return the KL divergence from a policy to a reference at N positions, (N,), fp64, in nats.

    Args:
        logits: The policy's logits, (N, V), already divided by the temperature.
        reference: The reference's logits, (N, V), likewise.
    """
    rows = max(1, CHUNK_ENTRIES // logits.shape[-1])
    return torch.cat([_kl_divergences(*both) for both in zip(logits.split(rows), reference.split(rows), strict=True)])


def _kl_divergences(logits: Tensor, reference: Tensor) -> Tensor:
    centred, weights, log_total = _centred(logits)
    other, _, log_total_of_other = _centred(reference)
    # A token of probability 0 under p adds 0, even if q excludes it too: 0 · (−inf + inf) would be nan.
    summed = torch.where(weights > 0, weights * (centred - other), 0.0).sum(dim=-1, dtype=torch.float64)
    return summed * (-log_total).exp() - log_total + log_total_of_other


def _centred(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return c and e^c, (N, V), in the precision of the logits, and log Z, (N,), fp64."""
    centred = logits - logits.amax(dim=-1, keepdim=True)
    weights = centred.exp()
    return centred, weights, weights.sum(dim=-1, dtype=torch.float64).log()
