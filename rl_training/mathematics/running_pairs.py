"""The mean over steps of two estimates whose errors are known together, and their ratio.

Batches of different steps are independent, so that of the mean Σ w x / Σ w, with w = decay^age, the covariance is
Σ w² C / (Σ w)². The degrees of freedom of the first one's variance are Satterthwaite's, (Σ w² V)² / Σ (w² V)² / ν.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.fieller import fieller_interval


@dataclass(frozen=True)
class Pair:
    """Two estimates from the same units, and how well they are known together."""

    values: Tensor  # (2,)
    covariance: Tensor  # (2, 2)
    degrees: float  # of freedom of the covariance

    def estimate(self, number: int, remark: str = "") -> Estimate:
        """Returns one of the two with its error."""
        variance = float(self.covariance[number, number])
        return Estimate(float(self.values[number]), math.sqrt(max(variance, 0.0)), int(self.degrees) + 1, remark)

    def minus_ratio(self, lost: str) -> Estimate:
        """Returns −second/first with Fieller's interval, missing for this reason where the first may be 0.

        Example: first −2 and second 6, without error of the first and with 1 of the second: 3 ± 0.5.
        """
        signs = self.values.new_tensor([1.0, -1.0])
        ends = fieller_interval(signs * self.values, signs.unsqueeze(1) * self.covariance * signs, self.degrees)
        if not math.isfinite(ends[0]):
            return Estimate.missing(lost)
        first, second = self.values.tolist()
        ratio = -second / first
        along = self.values.new_tensor([ratio, 1.0])  # ∂ratio = −(∂second + ratio ∂first) / first
        stderr = math.sqrt(max(float(along @ self.covariance @ along), 0.0)) / abs(first)
        return Estimate(ratio, stderr, int(self.degrees) + 1, interval=ends)


class RunningPair:
    """Averages pairs over steps.

    decay  weight of a step relative to the next
    """

    def __init__(self, decay: float, state: Tensor | None = None) -> None:
        self._decay = decay
        self.state = torch.zeros(8, dtype=torch.float64) if state is None else state

    def add(self, pair: Pair) -> None:
        """Takes in the pair of another step."""
        decay, cov = self._decay, pair.covariance
        square = cov[0, 0].square() / pair.degrees
        new = torch.stack([torch.ones_like(square), *pair.values, cov[0, 0], cov[0, 1], cov[1, 1], square])
        powers = new.new_tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0])
        self.state = torch.cat([decay**powers * self.state[:7] + new, self.state[7:] + 1.0])

    @property
    def steps(self) -> int:
        return int(self.state[7])

    def mean(self) -> Pair:
        """Returns the mean over the steps so far; after the first."""
        weight, one, two, first, mixed, second, squares = self.state[:7]
        covariance = torch.stack([first, mixed, mixed, second]).view(2, 2) / weight.square()
        degrees = float(first.square() / squares) if squares > 0 else 1.0
        return Pair(torch.stack([one, two]) / weight, covariance, degrees)
