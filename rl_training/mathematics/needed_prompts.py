"""How many prompts it takes for a step's change of entropy to be known to half of its size. Pure functions.

The step is the one that was made. With σ² the variance of one prompt's product X_p · δθ, a batch of P prompts knows it
to σ/√P, and that is half of the change Δ at

    P = 4 σ²/Δ².

F is `forward` of the step and B `backward` a batch later, V_F and V_B their variances given the step: without what
other batches' steps would do (engine/entropy_change.py). Then the trapezoid t = ½(F + B) has the variance
v = ¼(V_F + V_B), t² − v is unbiased for Δ², and n prompts a batch give σ² = 2 n v. One step does not tell. Sums over
about the last ten are divided,

    P = Σ_s w_s 4 σ_s² / Σ_s w_s Δ_s²,      w_s = decay^age / (mean of v over earlier steps),

each step relative to the noise of earlier ones, or else the first and largest would be all. These share no batch with
it: products have long tails, a batch that misses rare prompts has a small v, and by its own v it would weigh most.

Neighbouring steps share a batch, whose errors are nearly the same for both: the variances of the sums are doubled.
Where the changes are lost in their errors there is no value, and the interval has a lower end alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.running_pairs import Pair, RunningPair, fieller_quadratic

DECAY = 0.9  # weight of a step relative to the next
SCALE_DECAY = 0.7  # the same in the mean of the noise before
SHARED_BATCH = 2.0  # factor of variances: at worst the errors of two neighbouring steps are the same
LONG_TAILS = 2.0  # variance of a variance, over that of normal numbers
FEWEST_STEPS = 5  # in the sums
NONE_YET = f"fewer than {FEWEST_STEPS} steps with error bars are in the sums, after two that these are relative to"
NO_BAR = "no error bar: delta_h/needed_prompts has its interval"
LOST = "the changes of the last steps are lost in their errors: it takes more prompts than can be told"


def change_and_noise(change: float, variance: float, prompts: float, degrees: float) -> Pair:
    """Returns −Δ² and 4σ² of one step, whose −ratio is P.

    change, variance  of the trapezoid, given the step          degrees  of freedom of either batch's variance
    """
    square, of_variance = change**2 - variance, LONG_TAILS * variance**2 / degrees
    spread = 2.0 * variance**2 + 4.0 * max(square, 0.0) * variance + of_variance
    times = 8.0 * prompts
    covariance = [[spread, times * of_variance], [times * of_variance, times**2 * of_variance]]
    return Pair(
        torch.tensor([-square, times * variance], dtype=torch.float64),
        SHARED_BATCH * torch.tensor(covariance, dtype=torch.float64),
        degrees=degrees,
    )


class NeededPrompts:
    """Averages over steps; `state` goes into the checkpoint."""

    def __init__(self) -> None:
        self._mean = RunningPair(DECAY)
        # F and V_F of the batch before; v of the step closed last; Σ w v and Σ w of those before it
        self._last = torch.tensor([torch.nan, torch.nan, torch.nan, 0.0, 0.0], dtype=torch.float64)

    @property
    def state(self) -> Tensor:
        return torch.cat([self._last, self._mean.state])

    @state.setter
    def state(self, state: Tensor) -> None:
        self._last, self._mean.state = state[: len(self._last)], state[len(self._last) :]

    def add(self, values: Sequence[float], variances: Sequence[float], prompts: float, degrees: float) -> Estimate:
        """Returns P with its interval after another batch.

        values, variances  of forward of the step that this batch makes, and of backward of the step before, given these
                           steps; nan where there is none
        degrees            of freedom of the variances
        """
        before, before_variance, noise, total, weight = self._last.tolist()
        change, variance = 0.5 * (before + values[1]), 0.25 * (before_variance + variances[1])
        if math.isfinite(change) and 0 < variance < math.inf:
            if weight:
                self._mean.add(change_and_noise(change, variance, prompts, degrees).times(weight / total))
            if not math.isnan(noise):
                total, weight = SCALE_DECAY * total + noise, SCALE_DECAY * weight + 1.0
            noise = variance
        self._last = self._last.new_tensor([values[0], variances[0], noise, total, weight])
        return self.estimate()

    def estimate(self) -> Estimate:
        """Returns P with its interval. Example: Δ² = 1 and σ² = 6, without error, take 24 prompts."""
        if self._mean.steps < FEWEST_STEPS:
            return Estimate.missing(NONE_YET)
        mean = self._mean.mean()
        found = mean.minus_ratio(LOST)
        return found if found.value > 0 else Estimate(math.nan, reason=LOST, interval=(least(mean), math.inf))


def least(mean: Pair) -> float:
    """Returns the lower end of the interval of P that has no upper one; 0 where σ² is lost in its error, too."""
    signs = mean.values.new_tensor([-1.0, 1.0])
    covariance = signs.unsqueeze(1) * mean.covariance * signs
    square, linear, constant = fieller_quadratic(signs * mean.values, covariance, mean.degrees)
    if not constant > 0 > square:
        return 0.0
    return (linear - math.sqrt(linear**2 - square * constant)) / square


def relative_error(needed: Estimate, prompts: float) -> Estimate:
    """Returns the standard error of one step from so many prompts over the size of its change.

    Example: where 24 prompts are needed for one half, 6 give 1.
    """
    if math.isnan(needed.value):
        return needed
    return Estimate(0.5 * math.sqrt(needed.value / prompts), reason=NO_BAR)
