"""Reward as a function of entropy, R = −a e^H + b, and the ceiling that it implies where entropy is used up.

Runs that trade entropy for reward lie on such a curve (Cui et al., arXiv 2505.22617, who fitted it to Qwen2.5 and
others): reward then is foreseeable, and b − a, its value at H = 0, is the most that goes on like this can reach.

The law is a line in x = e^H, fitted by least squares over n points:

    slope = Σ (x − x̄)(R − R̄) / Sxx,   Sxx = Σ (x − x̄)²,   s² = Σ residual² / (n − 2),
    variance of the line at x          s² (1/n + (x − x̄)²/Sxx)
    variance of a new point at x       s² + that

with Student's t of n − 2 degrees of freedom. The errors are those of scatter about the curve: it must hold for them to
mean something, and points with correlated errors (neighbouring checkpoints of one run) make them too small. Noise in H,
which is not taken out, pulls a towards 0, by the share of it in the variance of e^H.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rl_training.mathematics.estimate import Estimate

MIN_POINTS = 4  # two numbers are fitted, and the scatter about them needs at least two more


@dataclass(frozen=True)
class RewardLaw:
    """R = −a e^H + b, fitted to `num_points` pairs.

    scatter  s, the standard deviation of points about the curve
    mean_x   x̄, the mean of e^H
    spread   Sxx
    """

    slope: float
    mean_reward: float
    scatter: float
    mean_x: float
    spread: float
    num_points: int

    @property
    def a(self) -> Estimate:
        """Returns a: the rise in reward per unit decrease of e^H."""
        return self._estimate(-self.slope, self.scatter / math.sqrt(self.spread))

    @property
    def b(self) -> Estimate:
        """Returns b, the curve at e^H = 0."""
        return self._at(0.0)

    @property
    def ceiling(self) -> Estimate:
        """Returns b − a, the reward that the curve predicts at H = 0."""
        return self.reward(0.0)

    def reward(self, entropy: float) -> Estimate:
        """Returns the curve at H = `entropy` (nats), with the error of the fit."""
        return self._at(math.exp(entropy))

    def mean_miss(self, entropies: Sequence[float], rewards: Sequence[float]) -> Estimate:
        """Returns the mean of R minus the curve over m new points; its error is that of the fit and of their scatter.

        se² = s² (1/m + 1/n + (mean x − x̄)²/Sxx): 0 within the error when the curve holds for them.
        """
        xs = [math.exp(entropy) for entropy in entropies]
        misses = [reward - self._at(x).value for x, reward in zip(xs, rewards, strict=True)]
        variance = 1 / len(xs) + self._variance(statistics.fmean(xs))
        return self._estimate(statistics.fmean(misses), self.scatter * math.sqrt(variance))

    def _at(self, x: float) -> Estimate:
        value = self.mean_reward + self.slope * (x - self.mean_x)
        return self._estimate(value, self.scatter * math.sqrt(self._variance(x)))

    def _variance(self, x: float) -> float:
        """Returns the variance of the line at x, in units of s²."""
        return 1 / self.num_points + (x - self.mean_x) ** 2 / self.spread

    def _estimate(self, value: float, stderr: float) -> Estimate:
        return Estimate(value, stderr, self.num_points - 1)  # Student's t with n − 2 degrees of freedom


def fit_reward_law(entropies: Sequence[float], rewards: Sequence[float]) -> RewardLaw:
    """Returns the least-squares fit of R = −a e^H + b to pairs of entropy (nats) and reward.

    Raises ValueError for fewer than MIN_POINTS pairs, and where all entropies are the same.
    """
    if len(entropies) < MIN_POINTS:
        raise ValueError(f"{len(entropies)} points: a curve with two parameters and an error needs {MIN_POINTS}")
    xs = [math.exp(entropy) for entropy in entropies]
    mean_x, mean_reward = statistics.fmean(xs), statistics.fmean(rewards)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread <= len(xs) * (1e-12 * mean_x) ** 2:  # nothing but rounding
        raise ValueError("the entropy is the same at all points: how reward depends on it cannot be estimated")
    slope = sum((x - mean_x) * (r - mean_reward) for x, r in zip(xs, rewards, strict=True)) / spread
    residuals = (r - mean_reward - slope * (x - mean_x) for x, r in zip(xs, rewards, strict=True))
    scatter = math.sqrt(sum(residual**2 for residual in residuals) / (len(xs) - 2))
    return RewardLaw(slope, mean_reward, scatter, mean_x, spread, len(xs))
