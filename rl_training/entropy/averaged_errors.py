"""Errors of a step's products, averaged over a few steps: one batch can miss rare responses and look too certain."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.statistics.running_variance import RunningVariance
from rl_training.step.quantities import PRODUCTS

BACKWARD = PRODUCTS.index("backward")


class AveragedErrors:
    """The variances of the products at the last steps.

    Those of the step that is being measured are in its own averages at once, and in later ones as `commit` says, once
    it is known whether the step was the optimizer's formula.
    """

    def __init__(self, kept: RunningVariance, decay: float) -> None:
        """Go on from the variances that are kept.

        Args:
            kept: of the last steps.
            decay: weight of an optimizer step relative to the next, measured or not.
        """
        self.kept = kept
        self._decay = decay
        self.begin()

    def begin(self) -> None:
        """Begin a step, of which nothing is known yet."""
        self._with_step = self.kept
        self._with_backward = self.kept  # of the step that alone, which does not depend on what the step is

    def average(self, variance: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's variances averaged over the last steps, and over how many batches.

        Args:
            variance: (products, …) of the step.
            step: its number.
        """
        self._with_step = self.kept.add(variance, step, self._decay)
        of_backward = torch.full_like(variance, torch.nan)
        of_backward[BACKWARD] = variance[BACKWARD]
        self._with_backward = self.kept.add(of_backward, step, self._decay)
        average, batches = self._with_step.average(self._decay)
        return average.view_as(variance), batches.view_as(variance)

    def commit(self, is_formula: bool) -> None:
        """Keep the variances of the step; where it was not the formula, that of `backward` alone."""
        self.kept = self._with_step if is_formula else self._with_backward
