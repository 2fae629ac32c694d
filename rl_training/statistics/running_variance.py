"""Variances of successive batches' estimates, averaged over a few steps.

A batch that misses rare responses looks too certain, because exactly then its own variance is small. The true variance
changes slowly along a run, so the average over the last steps, with weights w = decay^age, is more reliable:

    s² = Σ w s_j² / Σ w                    worth (Σ w s_j²)² / Σ (w s_j²)² batches of equal variance

The second is Satterthwaite's count: 1 for one batch, 3 for decay ½ and equal variances, and little more than 1 if one
variance dominates. Student's t has that many times one batch's degrees of freedom. An age is a number of optimizer
steps, measured or not. What is kept under a step's own number or a higher one does not count at it: a step that failed
and is taken again counts once, and numbering that restarts begins anew.

A dead step says nothing about the noise of a live one: if all rewards are equal, or the learning rate is 0 as at the
first step of a warm-up, hardly anything moves, and nothing varies. So a batch is left out, w = 0, if its variance is
below a hundredth of the newest one's. With the same noise, this would happen twice in a million times with 8 folds (F
with 7 and 7 degrees of freedom), and once in 600 with 4. A dead step itself keeps the larger variances of earlier
steps: a batch like theirs would have moved something.

Source: Satterthwaite 1946, "An approximate distribution of estimates of variance components".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MIN_WEIGHT = 1e-9  # a batch is dropped once its weight decay^age is below this
OF_THE_NEWEST = 0.01  # a batch with less than this share of the newest one's variance is a dead step, and left out


@dataclass(frozen=True)
class RunningVariance:
    """Variances of the last steps and their average, entry by entry. A step at which an entry is nan is skipped."""

    variances: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))  # (steps, entries)
    steps: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # (steps,), the newest last

    def add(self, variance: Tensor, step: int, decay: float) -> RunningVariance:
        """Return these variances with that of another step, and without those that no longer count.

        Args:
            variance: The step's variance, of any shape. A different number of entries discards the earlier variances.
            decay: The weight of an optimizer step relative to the next one, measured or not; 0 keeps the newest only.
        """
        newest = variance.reshape(1, -1)
        if self.variances.shape[1] != newest.shape[1]:
            return RunningVariance(newest, torch.tensor([step]))
        is_kept = counts_at(step, self.steps, decay, MIN_WEIGHT)
        return RunningVariance(
            torch.cat([self.variances[is_kept], newest]), torch.cat([self.steps[is_kept], torch.tensor([step])])
        )

    def average(self, decay: float) -> tuple[Tensor, Tensor]:
        """Average over the steps. At least one must have been added.

        Returns:
            The averaged variance, nan where the newest step's is, and the effective number of batches behind it,
            (entries,) each.
        """
        newest = self.variances[-1]
        weights = (decay ** (self.steps[-1] - self.steps).to(newest)).unsqueeze(1)
        is_counted = self.variances.isfinite() & (self.variances >= OF_THE_NEWEST * newest)
        terms = torch.where(is_counted, weights * self.variances, 0.0)
        average = terms.sum(dim=0) / torch.where(is_counted, weights, 0.0).sum(dim=0)  # 0/0 where the newest is nan
        squares = terms.square().sum(dim=0)
        return average, torch.where(squares > 0, terms.sum(dim=0).square() / squares, 1.0)


def counts_at(step: int, steps: Tensor, decay: float, min_weight: float) -> Tensor:
    """Return which of these steps count in an average that gets another step: earlier ones whose weight is not tiny.

    Args:
        step: The number of the step that is added.
        steps: Numbers of steps, (steps,).
        decay: The weight of an optimizer step relative to the next one.
        min_weight: The least weight decay^age with which a step counts.

    Returns:
        Whether each counts, (steps,).
    """
    return (steps < step) & (decay ** (step - steps).double() >= min_weight)
