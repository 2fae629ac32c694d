"""Averages the errors of a step's products over a few steps: one batch can miss rare responses and look too certain."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.statistics.running_variance import RunningVariance
from rl_training.step.quantities import PRODUCTS

BACKWARD = PRODUCTS.index("backward")


class AveragedErrors:
    """Holds the variances of the products at the last steps.

    The step being measured counts in its own averages at once. Whether it counts in later ones is decided by `commit`,
    when it is known whether the optimizer's step followed its formula.

    Args:
        kept: Variances of the last steps.
        decay: Weight of an optimizer step relative to the next, measured or not.
    """

    def __init__(self, kept: RunningVariance, decay: float) -> None:
        self.kept = kept
        self._decay = decay
        self.begin()

    def begin(self) -> None:
        """Begin a step that has no variances yet."""
        self._with_step = self.kept
        self._with_backward = self.kept  # with this step's `backward` only, which does not use the step's own δθ

    def average(self, variance: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the variances averaged over this and the last steps, and the number of batches behind each average.

        Args:
            variance: The step's own variances, (products, …).
            step: The step's number.
        """
        self._with_step = self.kept.add(variance, step, self._decay)
        backward_variance = torch.full_like(variance, torch.nan)
        backward_variance[BACKWARD] = variance[BACKWARD]
        self._with_backward = self.kept.add(backward_variance, step, self._decay)
        average, batches = self._with_step.average(self._decay)
        return average.view_as(variance), batches.view_as(variance)

    def commit(self, is_formula: bool) -> None:
        """Keep the step's variances for later averages, or only that of `backward` if the formula was not followed."""
        self.kept = self._with_step if is_formula else self._with_backward
