"""A policy's scores of sampled tokens. B sequences, T completion tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """The policy's log-probabilities and entropies at the completion tokens, in nats, at its sampling temperature."""

    logps: Tensor  # (B, T)
    entropies: Tensor  # (B, T), exact entropy of the next-token distribution
    mask: Tensor  # (B, T), 1 on sampled tokens; scores elsewhere are undefined
    varentropies: Tensor | None = None  # (B, T), Σ_v p_v (log p_v + h)², nats², no graph; None if not asked for

    @classmethod
    def unknown(cls, mask: Tensor) -> Scores:
        """Return nan in place of scores that nobody computed. `mask` is (B, T), 1 on sampled tokens."""
        missing = torch.full_like(mask, torch.nan, dtype=torch.float32)
        return cls(missing, missing, mask)

    def exact(self) -> Scores:
        """Return scores and mask in float64, with 0 off the mask."""
        logps, entropies = (values.double().masked_fill(self.mask == 0, 0.0) for values in (self.logps, self.entropies))
        return Scores(logps, entropies, self.mask.double())

    def detached(self) -> Scores:
        """Return the scores without graph, in at least fp32: a sum over tokens in bf16 would be off by several percent.

        >>> half = torch.ones(1, 300, dtype=torch.bfloat16)
        >>> Scores(half, half, half).detached().entropies.cumsum(dim=1)[0, -1]
        tensor(300.)
        """
        logps, entropies = (
            values.detach().to(torch.promote_types(values.dtype, torch.float32))
            for values in (self.logps, self.entropies)
        )
        return Scores(logps, entropies, self.mask)
