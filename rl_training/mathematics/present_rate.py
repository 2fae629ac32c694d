"""Where entropy would go at its present rate: when a straight line reaches a level, and whether by more than noise.

With H the token entropy and r its change per step, a level ℓ is reached within n steps when

    D(n) = (H − ℓ) + n r < 0

It is so by more than noise where the 95 % interval of D(n) leaves out 0: Var D = Var(H − ℓ) + n² Var r, degrees of
freedom by Welch, H and r taken as independent. That is no probability of its coming true: r itself changes, towards 0
where the curve of entropy flattens, and nothing here knows of that. r is a mean over steps, and its error the larger of
two: from how much the values differ from step to step, which holds what each batch happened to be, and from the
values' own errors.
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


def is_below_within(steps: int, distance: Estimate, rate: Estimate) -> bool:
    """Returns whether the straight line has gone `distance` within so many steps, by more than the noise of both.

    False without an error bar.
    """
    after = difference(distance, Estimate(-steps * rate.value, steps * rate.stderr, rate.num_samples, rate.reason))
    return after.value < 0 and is_significant(after)


def steps_left(distance: Estimate, rate: Estimate) -> float:
    """Returns in how many steps a straight line goes `distance`: 0 if it has, infinite at a rate that does not fall."""
    if distance.value <= 0:
        return 0.0
    return distance.value / -rate.value if rate.value < 0 else math.inf
