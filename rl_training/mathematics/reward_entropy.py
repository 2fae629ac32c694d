"""Reward as a function of entropy, R = −a e^H + b, and the ceiling that it implies where entropy is used up.

Runs that trade entropy for reward lie on such a curve (Cui et al., arXiv 2505.22617, who fitted it to Qwen2.5 and
others). Reward can then be foreseen, and b − a, its value at H = 0, is the ceiling of such a run.

The law is a line in x = e^H, fitted by least squares over n points. With s² = Σ residual² / (n − 2), and C the
covariance of slope and intercept:

    variance of the line at x          (x, 1) C (x, 1)ᵀ
    variance of a new point at x       s² + that

with Student's t of n − 2 degrees of freedom. The errors come from the scatter about the curve, and assume that it
holds. Points with correlated errors (neighbouring checkpoints of one run) make them too small. Noise in H, which is not
taken out, pulls a towards 0, by its share in the variance of e^H.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.mathematics.estimate import Estimate

MIN_POINTS = 4  # two numbers are fitted, and the scatter about them needs at least two more


@dataclass(frozen=True)
class RewardLaw:
    """R = −a e^H + b, fitted to `num_points` pairs."""

    line: Tensor  # (2,) fp64, slope −a and intercept b
    solve: Tensor  # (2, n), `line` as a function of the rewards: C = s² solve solveᵀ
    variance: float  # s², of points about the curve
    num_points: int

    @property
    def a(self) -> Estimate:
        """Returns a: the rise in reward per unit decrease of e^H."""
        return self._combined([-1.0, 0.0])

    @property
    def b(self) -> Estimate:
        """Returns b, the curve at e^H = 0."""
        return self._combined([0.0, 1.0])

    @property
    def ceiling(self) -> Estimate:
        """Returns b − a, the reward that the curve predicts at H = 0."""
        return self.reward(0.0)

    def reward(self, entropy: float) -> Estimate:
        """Returns the curve at H = `entropy` (nats), with the error of the fit."""
        return self._combined([math.exp(entropy), 1.0])

    def mean_miss(self, entropies: Sequence[float], rewards: Sequence[float]) -> Estimate:
        """Returns the mean of R minus the curve over m new points; its error is that of the fit and of their scatter.

        se² = s²/m + the variance of the line at their mean x: 0 within the error when the curve holds for them.
        """
        on_curve = self._combined([float(_powers(entropies).mean()), 1.0])
        stderr = math.sqrt(self.variance / len(entropies) + on_curve.stderr**2)
        return Estimate(statistics.fmean(rewards) - on_curve.value, stderr, on_curve.num_samples)

    def _combined(self, factors: Sequence[float]) -> Estimate:
        """Returns these multiples of slope and intercept as a sum; Student's t with n − 2 degrees of freedom."""
        factor = self.line.new_tensor(factors)
        # A norm: where entropies hardly differ, f C fᵀ may be below 0 by rounding.
        stderr = math.sqrt(self.variance) * float((factor @ self.solve).norm())
        return Estimate(float(factor @ self.line), stderr, self.num_points - 1)


def fit_reward_law(entropies: Sequence[float], rewards: Sequence[float]) -> RewardLaw:
    """Returns the least-squares fit of R = −a e^H + b to pairs of entropy (nats) and reward.

    Raises ValueError for fewer than MIN_POINTS pairs, and where all entropies are the same.
    """
    if len(entropies) < MIN_POINTS:
        raise ValueError(f"{len(entropies)} points: a curve with two parameters and an error needs {MIN_POINTS}")
    x, y = _powers(entropies), torch.tensor(rewards, dtype=torch.float64)
    if x.std() <= 1e-12 * x.mean():  # nothing but rounding
        raise ValueError("the entropy is the same at all points: how reward depends on it cannot be estimated")
    design = torch.stack([x, torch.ones_like(x)], dim=1)
    solve = torch.linalg.pinv(design)  # (2, n)
    line = solve @ y
    variance = float((y - design @ line).square().sum()) / (len(x) - 2)
    return RewardLaw(line, solve, variance, len(x))


def _powers(entropies: Sequence[float]) -> Tensor:
    """Returns e^H."""
    return torch.tensor(entropies, dtype=torch.float64).exp()
