"""The next-token distribution at each position: log-probability, entropy and divergence, exact over the vocabulary.

    h_k  = −Σ_v p_k(v) log p_k(v)
    KL_k =  Σ_v p_k(v) (log p_k(v) − log q_k(v))                     nats

Averaged over responses sampled from p, Σ_k KL_k is unbiased for the divergence between the two distributions of whole
responses, KL(p‖q) = E[Σ_k KL_k] by the chain rule, and less noisy than Σ_k log p(t_k) − log q(t_k) of the sampled
tokens: the last draw is averaged out at every position.

With c = x − max x of the logits x, and Z = Σ_v e^c_v,

    log p_k(t) = c_t − log Z,    h_k = log Z − Σ_v e^c_v c_v / Z,    KL_k = Σ_v e^c_v (c_v − c'_v) / Z − log Z + log Z'.

Terms are in the precision of the logits, sums over the vocabulary in fp64: of fp32 logits that is within 1e-7 nats of
all in fp64, whose exponentials are slow on most GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2**22  # entries of a vocabulary-wide tensor whose terms are held at once


@dataclass(frozen=True)
class PositionScores:
    """The scores of one or two policies at N positions, in nats, fp64."""

    logps: Tensor  # (N,), of the token at that position
    entropies: Tensor  # (N,)
    kl: Tensor | None  # (N,), from the policy to the reference; None without one


def score_positions(logits: Tensor, tokens: Tensor, reference: Tensor | None = None) -> PositionScores:
    """Returns log-probabilities, entropies and divergences of N positions.

    logits     (N, V) of the policy, already divided by the temperature
    tokens     (N,) the tokens that were sampled there
    reference  (N, V) of the other policy, at the same temperature; optional
    """
    rows = max(1, CHUNK // logits.shape[-1])
    references = [None] * -(-len(logits) // rows) if reference is None else reference.split(rows)
    parts = [_score(*part) for part in zip(logits.split(rows), tokens.split(rows), references, strict=True)]
    return PositionScores(
        logps=torch.cat([part.logps for part in parts]),
        entropies=torch.cat([part.entropies for part in parts]),
        kl=None if reference is None else torch.cat([part.kl for part in parts if part.kl is not None]),
    )


def _score(logits: Tensor, tokens: Tensor, reference: Tensor | None) -> PositionScores:
    largest = logits.amax(dim=-1)
    centred, weights, log_total = _centred(logits, largest)

    def mean(values: Tensor) -> Tensor:
        # A token that p rules out adds nothing, also where q rules it out too: not 0 · (−inf + inf).
        summed = torch.where(weights > 0, weights * values, 0.0).sum(dim=-1, dtype=torch.float64)
        return summed * (-log_total).exp()

    kl = None
    if reference is not None:
        other, _, other_total = _centred(reference, reference.amax(dim=-1))
        kl = mean(centred - other) - log_total + other_total
    return PositionScores(
        logps=logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double() - largest.double() - log_total,
        entropies=log_total - mean(centred),
        kl=kl,
    )


def _centred(logits: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns c and e^c, (N, V) in the precision of the logits, and log Z, (N,) fp64."""
    centred = logits - largest.unsqueeze(-1)
    weights = centred.exp()
    return centred, weights, weights.sum(dim=-1, dtype=torch.float64).log()
