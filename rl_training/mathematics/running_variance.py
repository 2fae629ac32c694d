"""Variances of successive batches' estimates, averaged over a few steps.

A batch that misses rare responses looks too certain: its own variance is small exactly then. The true variance changes
slowly along a run, so the average over the last steps, with weights w = decay^age, is more reliable:

    s² = Σ w s_j² / Σ w                    of (Σ w s_j²)² / Σ (w s_j²)² batches of equal variance

The second is Satterthwaite's count: 1 for one batch, 3 for decay ½ and equal variances, and hardly more than 1 where
one variance dominates. Student's t has that many times one batch's degrees of freedom.

Source: Satterthwaite 1946, "An approximate distribution of estimates of variance components".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class RunningVariance:
    """Averages variances over steps, entry by entry; an entry that is nan at a step is not counted there.

    decay  weight of a step relative to the next; 0 for the newest alone
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._state: dict[str, Tensor] = {}

    def add(self, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the averaged variance, nan where this one is, and the effective number of batches behind it."""
        finite = variance.isfinite()
        new = torch.where(finite, variance, 0.0)
        terms = {"weight": finite.to(new), "sum": new, "squares": new.square()}
        if self._state and self._state["sum"].shape == variance.shape:
            factors = {"weight": self._decay, "sum": self._decay, "squares": self._decay**2}
            terms = {name: factors[name] * self._state[name] + term for name, term in terms.items()}
        self._state = terms
        average = torch.where(finite, terms["sum"] / terms["weight"], torch.nan)
        batches = torch.where(terms["squares"] > 0, terms["sum"].square() / terms["squares"], 1.0)
        return average, batches

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the sums; empty before the first step."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` returned; of nothing, it begins anew."""
        self._state = dict(state)
