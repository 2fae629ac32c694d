"""Variances of successive batches' estimates, averaged over a few steps.

A batch that misses rare responses looks too certain: its own variance is small exactly then. The true variance changes
slowly along a run, so the average over the last steps, with weights w = decay^age, is more reliable:

    s² = Σ w s_j² / Σ w                    of (Σ w s_j²)² / Σ (w s_j²)² batches of equal variance

The second is Satterthwaite's count: 1 for one batch, 3 for decay ½ and equal variances, and hardly more than 1 where
one variance dominates. Student's t has that many times one batch's degrees of freedom. An age is a number of optimizer
steps, measured or not.

A dead step says nothing about the noise of a live one: where all rewards are equal, or the learning rate is 0 as at
the first step of a warm-up, hardly anything moves, and nothing varies. So a batch is left out, w = 0, whose variance is
below a hundredth of the newest: of the same noise it would be that small twice in a million times with 8 folds (F of 7
and 7 degrees of freedom), and once in 600 with 4. A dead step itself keeps the larger variances of those before: a
batch like theirs would have moved something.

Source: Satterthwaite 1946, "An approximate distribution of estimates of variance components".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

SMALLEST_WEIGHT = 1e-9  # a batch is forgotten when its weight decay^age falls below this
OF_THE_NEWEST = 0.01  # a batch whose variance is below this share of the newest one is a dead step, and left out


class RunningVariance:
    """The average of variances over steps, entry by entry. An entry that is nan at a step is not counted there."""

    def __init__(self, decay: float) -> None:
        """Begin without any step.

        Args:
            decay: the weight of an optimizer step relative to the next one, measured or not; 0 keeps the newest only.
        """
        self._decay = decay
        self._state: dict[str, Tensor] = {}

    def add(self, variance: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Add the variance of a step.

        Returns:
            The averaged variance, nan where this step's is, and the effective number of batches behind it.
        """
        variances = variance.unsqueeze(0)
        steps = torch.tensor([step])
        if self._state and self._state["variances"].shape[1:] == variance.shape:
            is_kept = self._state["steps"] > step - self._memory
            variances = torch.cat([self._state["variances"][is_kept], variances])
            steps = torch.cat([self._state["steps"][is_kept], steps])
        self._state = {"variances": variances, "steps": steps}
        weights = (self._decay ** (step - steps).to(variance)).view(-1, *[1] * variance.dim())
        is_counted = variances.isfinite() & (variances >= OF_THE_NEWEST * variance)
        terms = torch.where(is_counted, weights * variances, 0.0)
        average = terms.sum(dim=0) / torch.where(is_counted, weights, 0.0).sum(dim=0)  # 0/0 where `variance` is nan
        squares = terms.square().sum(dim=0)
        return average, torch.where(squares > 0, terms.sum(dim=0).square() / squares, 1.0)

    @property
    def _memory(self) -> int:
        """How many optimizer steps a batch is remembered for."""
        return 1 if self._decay == 0.0 else math.ceil(math.log(SMALLEST_WEIGHT) / math.log(self._decay))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the variances so far and their steps; empty before the first step."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; an empty state begins without any step."""
        self._state = dict(state)
