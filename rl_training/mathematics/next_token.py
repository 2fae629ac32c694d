"""The next-token distribution at each position: log-probability, entropy and divergence, exact over the vocabulary.

    h_k  = −Σ_v p_k(v) log p_k(v)
    KL_k =  Σ_v p_k(v) (log p_k(v) − log q_k(v))                     nats

Averaged over responses sampled from p, Σ_k KL_k is unbiased for the divergence between the two distributions of whole
responses, KL(p‖q) = E[Σ_k KL_k] by the chain rule, and less noisy than Σ_k log p(t_k) − log q(t_k) of the sampled
tokens: the last draw is averaged out at every position.
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
    kl: Tensor | None = None  # (N,), from the policy to the reference; None without one


def score_positions(logits: Tensor, tokens: Tensor, reference: Tensor | None = None) -> PositionScores:
    """Returns log-probabilities, entropies and divergences of N positions.

    logits     (N, V) of the policy, already divided by the temperature
    tokens     (N,) the tokens that were sampled there
    reference  (N, V) of the other policy, at the same temperature; optional
    """
    rows = max(1, CHUNK // logits.shape[-1])
    references = [None] * -(-len(logits) // rows) if reference is None else reference.split(rows)
    parts = [_score(*part) for part in zip(logits.split(rows), tokens.split(rows), references, strict=True)]
    logps, entropies, *divergences = (torch.cat(values) for values in zip(*parts, strict=True))
    return PositionScores(logps, entropies, *divergences)


def _score(logits: Tensor, tokens: Tensor, reference: Tensor | None) -> list[Tensor]:
    log_p = logits.double().log_softmax(dim=-1)
    p = log_p.exp()
    scores = [log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), torch.special.entr(p).sum(dim=-1)]
    if reference is None:
        return scores
    # A token that p rules out adds nothing, also where q rules it out too: not 0 · (−inf + inf).
    of_token = torch.where(p > 0, p * (log_p - reference.double().log_softmax(dim=-1)), 0.0)
    return [*scores, of_token.sum(dim=-1)]
