"""What a loss does about a sampler that is not the policy: factors on its tokens, of ratios in bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """A loss's factor on each token: the ratio ρ = π/μ to the sampler, truncated or masked.

    sequence   ρ is that of the whole response, else of the token
    masks      a ratio outside of the bounds counts 0; else it is truncated to them
    low, high  the bounds of ρ
    """

    sequence: bool = False
    masks: bool = False
    low: float = 0.0
    high: float = math.inf

    def factors(self, log_ratios: Tensor) -> Tensor:
        """Returns the factors, (B, T).

        log_ratios  (B, T), log π − log μ, 0 where the loss has no token
        """
        ratios = self.ratios(log_ratios)
        if self.masks:
            return ratios.masked_fill((ratios < self.low) | (ratios > self.high), 0.0)
        return ratios.clamp(self.low, self.high)

    def ratios(self, log_ratios: Tensor) -> Tensor:
        """Returns the ratios before the bounds, (B, T)."""
        whole = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios) if self.sequence else log_ratios
        return whole.exp()

    def __str__(self) -> str:
        bounds = " and ".join(
            f"{word} {bound:g}"
            for word, bound, none in (("at least", self.low, 0.0), ("at most", self.high, math.inf))
            if bound != none
        )
        kind = "mask" if self.masks else "truncation"
        return f"ratios of {'responses' if self.sequence else 'tokens'}, {kind}: {bounds or 'no bounds'}"
