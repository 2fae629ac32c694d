"""How many prompts a step takes for its change of entropy to be known to half of its size. Pure functions.

The error of `forward` from P prompts is σ/√P, σ that of a single prompt. With Δ the size of the change it is half of
it at

    P = 4 σ² / Δ²,      σ² = P se²(forward),  Δ² = t² − se²(t),  t the trapezoid of the same step

in which t² − se² is unbiased for the square of the change. One step does not tell: numerator and denominator are
averaged over about ten, apart, and divided last, with Fieller's interval. It has no end where the changes are lost in
their errors.
"""

from __future__ import annotations

import math

import torch

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.running_pairs import Pair, RunningPair

DECAY = 0.9  # weight of a step relative to the next
NONE_YET = "no step is closed yet"
NO_BAR = "no error bar: delta_h/needed_prompts has its interval"
LOST = "the changes of the last steps are lost in their errors: it takes more prompts than can be told"


def square_and_variance(change: float, stderr: float, variance: float, degrees: float) -> Pair:
    """Returns −Δ² and 4 σ² of one step, whose −ratio is P.

    change, stderr  of the trapezoid
    variance        σ²
    degrees         of freedom of the errors
    """
    square, noise = change**2 - stderr**2, stderr**2
    spread = 2.0 * noise**2 + 4.0 * max(square, 0.0) * noise
    values = torch.tensor([-square, 4.0 * variance], dtype=torch.float64)
    spreads = torch.tensor([spread, 2.0 / degrees * (4.0 * variance) ** 2], dtype=torch.float64)
    return Pair(values, spreads.diag(), degrees)


def needed_prompts(mean: RunningPair) -> Estimate:
    """Returns P with its interval, from the running mean of `square_and_variance`.

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
