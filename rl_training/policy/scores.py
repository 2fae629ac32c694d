"""A policy's scores of sampled tokens: all that the formulas need. B sequences, T completion tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """The policy's log-probabilities and entropies at the completion tokens, in nats, at its sampling temperature."""

    logps: Tensor  # (B, T)
    entropies: Tensor  # (B, T), exact entropy of the next-token distribution
    mask: Tensor  # (B, T), 1 on sampled tokens; values elsewhere mean nothing

    def exact(self) -> Scores:
        """Return them in float64, the mask too; 0 where no token is, whatever stands there."""
        logps, entropies = (values.double().masked_fill(self.mask == 0, 0.0) for values in (self.logps, self.entropies))
        return Scores(logps, entropies, self.mask.double())

    def detached(self) -> Scores:
        """Return them without graph, in at least fp32: a sum over tokens in bf16 is off by percents.

        >>> half = torch.ones(1, 300, dtype=torch.bfloat16)
        >>> Scores(half, half, half).detached().entropies.cumsum(dim=1)[0, -1]
        tensor(300.)
        """
        logps, entropies = (
            values.detach().to(torch.promote_types(values.dtype, torch.float32))
            for values in (self.logps, self.entropies)
        )
        return Scores(logps, entropies, self.mask)
