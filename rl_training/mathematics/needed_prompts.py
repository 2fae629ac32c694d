"""How many prompts a step takes for its change of entropy to be known to half of its size. Pure functions.

The error of `forward` from P prompts is σ/√P, σ that of a single prompt. With Δ the size of the change it is half of
it at

    P = 4 / (Δ²/σ²),      σ² = P se²(forward),  Δ² = t² − se²(t),  t the trapezoid that this step closes

in which t² − se² is unbiased for the square of the change, and (ν − 2)/ν takes out the bias of 1/σ² from ν degrees of
freedom. One step does not tell: Δ²/σ² is averaged over about ten, and divided last. (Averages of Δ² and of σ² apart
would be those of the largest steps, which a run begins with.) The interval has no end where the changes are lost in
their errors.
"""

from __future__ import annotations

import math

import torch

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.running_pairs import Pair, RunningPair

DECAY = 0.9  # weight of a step relative to the next
ENOUGH_FREEDOM = 4  # more than so many degrees, or 1/σ² has no variance
NONE_YET = "no step with an error bar is closed yet: it takes 6 folds of prompts"
NO_BAR = "no error bar: delta_h/needed_prompts has its interval"
LOST = "the changes of the last steps are lost in their errors: it takes more prompts than can be told"


def signal_to_noise(change: float, stderr: float, variance: float, degrees: float) -> Pair:
    """Returns −Δ²/4σ² of one step, and 1: −ratio is P.

    change, stderr  of the trapezoid
    variance        σ², with so many degrees of freedom, more than four
    """
    scale = 4.0 * variance * degrees / (degrees - 2.0)
    square, noise = (change**2 - stderr**2) / scale, stderr**2 / scale
    spread = 2.0 * noise**2 + 4.0 * max(square, 0.0) * noise + 2.0 / (degrees - 4.0) * square**2
    covariance = torch.tensor([spread, 0.0], dtype=torch.float64).diag()
    return Pair(torch.tensor([-square, 1.0], dtype=torch.float64), covariance, degrees)


def needed_prompts(mean: RunningPair) -> Estimate:
    """Returns P with its interval, from the running mean of `signal_to_noise`.

    Example: Δ² = 1 and σ² = 6, without error, take 24 prompts.
    """
    if not mean.steps:
        return Estimate.missing(NONE_YET)
    found = mean.mean().minus_ratio(LOST)
    return found if found.value > 0 or math.isnan(found.value) else Estimate.missing(LOST)


def relative_error(needed: Estimate, prompts: float) -> Estimate:
    """Returns the standard error of one step from so many prompts over the size of its change.

    Example: where 24 prompts are needed for one half, 6 give 1.
    """
    if math.isnan(needed.value):
        return needed
    return Estimate(0.5 * math.sqrt(needed.value / prompts), reason=NO_BAR)
