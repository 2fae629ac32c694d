"""Where entropy goes at its present rate: when a level is reached, and whether that is certain.

With H the token entropy and r its change per step, a level ℓ is reached within n steps when

    D(n) = (H − ℓ) + n r < 0

It is certain where the 95 % interval of D(n) leaves out 0: Var D = Var(H − ℓ) + n² Var r, degrees of freedom by Welch,
H and r taken as independent. r is a mean over steps, and its error the larger of two: from how much the values differ
from step to step, which holds what each batch happened to be, and from the values' own errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import difference, is_significant, mean_of


def present_rate(changes: Sequence[Estimate]) -> Estimate:
    """Returns the mean change per step of predictions for single steps, with the larger of its two errors.

    Of a single step with its own error; without one where a step has none. nan where a step is nan.
    """
    missing = next((e.reason for e in changes if math.isnan(e.value)), "" if changes else "there is no step")
    if missing:
        return Estimate.missing(missing)
    between = mean_of([e.value for e in changes])
    stderr = math.sqrt(sum(e.stderr**2 for e in changes)) / len(changes)
    within = Estimate(between.value, stderr, min(e.num_samples for e in changes), "a step has no error bar")
    if len(changes) == 1 or math.isnan(stderr):
        return within
    return max(within, between, key=Estimate.half_width)


def half_of(entropy: Estimate) -> Estimate:
    """Returns how far it is to half of what is left."""
    return Estimate(entropy.value / 2, entropy.stderr / 2, entropy.num_samples, entropy.reason)


def down_to(level: float, entropy: Estimate) -> Estimate:
    """Returns how far it is to a level; negative where entropy is below it."""
    return Estimate(entropy.value - level, entropy.stderr, entropy.num_samples, entropy.reason)


def is_certain_within(steps: int, distance: Estimate, rate: Estimate) -> bool:
    """Returns whether `distance` is gone within so many steps at this rate, at 95 %; False without an error bar."""
    after = difference(distance, Estimate(-steps * rate.value, steps * rate.stderr, rate.num_samples, rate.reason))
    return after.value < 0 and is_significant(after)


def steps_left(distance: Estimate, rate: Estimate) -> tuple[float, float, float]:
    """Returns in how many steps `distance` is gone, and the ends of that for the 95 % interval of the rate.

    0 where it is gone already, infinite at a rate that does not fall.
    """
    half = rate.half_width()
    at, fast, slow = (_steps(distance.value, r) for r in (rate.value, rate.value - half, rate.value + half))
    return at, fast, slow


def _steps(distance: float, rate: float) -> float:
    if distance <= 0:
        return 0.0
    return distance / -rate if rate < 0 else math.inf
