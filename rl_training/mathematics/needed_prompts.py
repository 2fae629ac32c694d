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
A sum of variances with long tails is too low as often as too high, and by factors: the interval is one of log P. Where
the changes are lost in their errors there is no value, and the interval has a lower end alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.special import stdtrit
from torch import Tensor

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.running_pairs import Pair, RunningPair

DECAY = 0.9  # weight of a step relative to the next
SCALE_DECAY = 0.7  # the same in the mean of the noise before
SHARED_BATCH = 2.0  # factor of variances: at worst the errors of two neighbouring steps are the same
LONG_TAILS = 10.0  # variance of a variance, over that of normal numbers; of single batches 24 was measured
FEWEST_STEPS = 5  # in the sums
NONE_YET = f"it averages over steps: it begins with batch {FEWEST_STEPS + 3} of those with an error bar"
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
        return on_log_scale(self._mean.mean())


def on_log_scale(mean: Pair) -> Estimate:
    """Returns P of the means of −Δ² and 4σ², with the interval P e^(± q se(log P)), q Student's quantile.

    Where Δ² may be 0, no value and the least P, of the largest Δ² and the smallest 4σ².
    Example, Δ² = 4 ± 1 and 4σ² = 24 without error, from many degrees: 6, from 6 e^(−.49) = 3.7 to 6 e^.49 = 9.8.
    """
    square, variance = -float(mean.values[0]), float(mean.values[1])
    quantile, own = float(stdtrit(mean.degrees, 0.975)), mean.covariance.diag().sqrt().tolist()
    if square <= quantile * own[0]:
        largest, smallest = max(square, 0.0) + quantile * own[0], variance * math.exp(-quantile * own[1] / variance)
        return Estimate(math.nan, reason=LOST, interval=(smallest / largest, math.inf))
    along = mean.values.new_tensor([1.0 / square, 1.0 / variance])
    relative = math.sqrt(max(float(along @ mean.covariance @ along), 0.0))
    needed, factor = variance / square, math.exp(quantile * relative)
    return Estimate(needed, needed * relative, int(mean.degrees) + 1, interval=(needed / factor, needed * factor))


def relative_error(needed: Estimate, prompts: float) -> Estimate:
    """Returns the standard error of one step from so many prompts over the size of its change.

    Example: where 24 prompts are needed for one half, 6 give 1.
    """
    if math.isnan(needed.value):
        return needed
    return Estimate(0.5 * math.sqrt(needed.value / prompts), reason=NO_BAR)
