"""A policy's scores of sampled tokens: all that the formulas need. B sequences, T completion tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """The policy's log-probabilities and entropies at the completion tokens, in nats, at its sampling temperature."""

    logps: Tensor  # (B, T)
    entropies: Tensor  # (B, T), exact entropy of the next-token distribution
    mask: Tensor  # (B, T), 1 on sampled tokens; values elsewhere mean nothing
