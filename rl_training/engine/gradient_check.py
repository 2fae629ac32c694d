"""Check whether the step's gradient is the mean of its microbatches' gradients, as hooks have caught them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_training.statistics.unavailable import Unavailable

TOLERANCE = 1e-3  # relative to the norm of the step's gradient: largest distance from the mean over microbatches
TOLERANCE_ROUNDED = 0.05  # the same if gradients are summed in half precision
ROUNDING = 1e-5  # relative to the sum of all folds' norms: the folds may nearly cancel
GRADIENT_IN_PARTS = Unavailable(
    "gradient_in_parts",
    "the gradient differs from that of the microbatches, because parameters received it in several parts",
    fix="call backward once for each microbatch, and use checkpointing with use_reentrant=False",
)
GRADIENT_MISMATCH = Unavailable(
    "gradient_mismatch",
    "the gradient differs from that of the microbatches by {distance:.2g} of its norm: an extra backward, a "
    "missing zero_grad or one between microbatches, a GradScaler, or edited gradients",
)


@dataclass(frozen=True)
class CaughtSums:
    """What tells whether the gradients that were caught by fold add up to the step's: numbers over all ranks.

    Sums of squares are over sampled entries, extrapolated to all.
    """

    num_late: float  # gradients that came in several parts, of which only the first were caught
    sq_distance: float  # of the step's gradient minus the mean of all caught gradients
    sq_norm: float  # of the step's gradient
    fold_sq_norms: list[float]  # of each fold's gradient

    def distance_beyond(self, tolerance: float) -> float | None:
        """Return how far the step's gradient is from that of its folds, relative to its norm; None if within tolerance.

        Args:
            tolerance: Relative to the norm of the step's gradient.
        """
        distance = math.sqrt(self.sq_distance)
        norm = math.sqrt(self.sq_norm)
        allowed = tolerance * norm + ROUNDING * sum(map(math.sqrt, self.fold_sq_norms))
        if not math.isfinite(distance) or distance <= allowed:
            return None
        return distance / norm if norm else math.inf


def gradient_mismatch(sums: CaughtSums, is_rounded: bool) -> Unavailable | None:
    """Return the reason why the step's gradient is not the mean of its microbatches' gradients, or None.

    Args:
        sums: What was caught of them.
        is_rounded: Gradients are summed in half precision.
    """
    if sums.num_late:
        return GRADIENT_IN_PARTS
    distance = sums.distance_beyond(TOLERANCE_ROUNDED if is_rounded else TOLERANCE)
    return None if distance is None else GRADIENT_MISMATCH.formatted(distance=distance)
