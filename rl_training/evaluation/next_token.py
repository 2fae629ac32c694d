"""How far one next-token distribution is from another at each position, exact over the vocabulary.

    KL_k = Σ_v p_k(v) (log p_k(v) − log q_k(v))                     nats

Averaged over responses sampled from p, Σ_k KL_k is unbiased for the divergence between the two distributions of whole
responses, KL(p‖q) = E[Σ_k KL_k] by the chain rule, and less noisy than Σ_k log p(t_k) − log q(t_k) of the sampled
tokens: the last draw is averaged out at every position.

With c = x − max x of the logits x of p, c' of q, and Z = Σ_v e^c_v, it is Σ_v e^c_v (c_v − c'_v) / Z − log Z + log Z'.
Terms are in the precision of the logits, sums over the vocabulary in fp64: of fp32 logits that is within 1e-7 nats of
all in fp64, whose exponentials are slow on most GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**22  # entries of a vocabulary-wide tensor whose terms are held at once


def divergences(logits: Tensor, reference: Tensor) -> Tensor:
    """Return the divergence from one policy to the reference at N positions, (N,) fp64.

    Args:
        logits, reference: (N, V), already divided by the temperature
    """
    rows = max(1, CHUNK // logits.shape[-1])
    return torch.cat([_divergences(*both) for both in zip(logits.split(rows), reference.split(rows), strict=True)])


def _divergences(logits: Tensor, reference: Tensor) -> Tensor:
    centred, weights, log_total = _centred(logits)
    other, _, log_total_of_other = _centred(reference)
    # A token that p rules out adds nothing, also where q rules it out too: not 0 · (−inf + inf).
    summed = torch.where(weights > 0, weights * (centred - other), 0.0).sum(dim=-1, dtype=torch.float64)
    return summed * (-log_total).exp() - log_total + log_total_of_other


def _centred(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return c and e^c, (N, V) in the precision of the logits, and log Z, (N,) fp64."""
    centred = logits - logits.amax(dim=-1, keepdim=True)
    weights = centred.exp()
    return centred, weights, weights.sum(dim=-1, dtype=torch.float64).log()
