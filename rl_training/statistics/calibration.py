"""How well predictions match the truth over measured steps: slope, correlation, sign agreement and coverage.

From n pairs of a prediction p (standard error s, ν degrees of freedom) and the truth t (standard error τ) of the same
step:

    slope            Σ p t / Σ p²            of the truth on the prediction, through the origin; 1 if they agree.
                                             Noise in p makes it smaller than 1
    slope_corrected  Σ p t / Σ (p² − s²)     the same with the noise of p removed: E p² = (E p)² + s²
    correlation      Pearson's, of p and t
    sign_agreement   share of pairs with p t > 0
    coverage         share of pairs with |p − t| ≤ q √(s² + τ²): 0.95 if the error bars are honest

q is the 97.5 % quantile of Student's t with Welch's degrees of freedom ν (1 + τ²/s²)². The truth has hundreds of
degrees of freedom, which count as infinitely many. Standard errors are from the delete-one-pair jackknife. Steps share
momentum, but most of the scatter is noise of p and t, which is fresh at every step.

Sources: Fuller 1987, "Measurement error models", ch. 1 (the correction); Welch 1947 (the degrees of freedom).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import ndtri, stdtrit

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable

MIN_PAIRS = 8  # with fewer, any cloud of points looks like a line
NO_NOISE_LEFT = Unavailable(
    "predictions_lost_in_noise",
    "the predictions are smaller than their own error bars: subtracting their noise leaves nothing",
)
ALL_ZERO = Unavailable("all_zero", "all predictions are zero")
NO_SPREAD = Unavailable("no_spread", "all predictions, or all truths, are the same number")
NO_HITS = Unavailable("no_pairs", "there are no pairs")
FEW_PAIRS = Unavailable("few_pairs", "{count} pairs of prediction and truth: at least {least} are needed{detail}")
NO_ERROR_BARS = "needs the standard errors of prediction and truth"


def interval_covers(difference: float, stderr: float, num_samples: int, other_stderr: float) -> float:
    """Return 1.0 if the 95 % interval of a difference includes 0, else 0.0; nan if a standard error is nan.

    Args:
        difference: The difference of two independent estimates.
        stderr: The first estimate's standard error.
        num_samples: Its degrees of freedom plus 1.
        other_stderr: The second estimate's standard error, with infinitely many degrees of freedom.
    """
    if math.isnan(stderr) or math.isnan(other_stderr):
        return math.nan
    freedom = (num_samples - 1) * (1 + (other_stderr / stderr) ** 2) ** 2 if stderr else math.inf
    quantile = float(ndtri(0.975) if math.isinf(freedom) else stdtrit(freedom, 0.975))
    return float(abs(difference) <= quantile * math.hypot(stderr, other_stderr))


def calibration(pairs: Sequence[tuple[Estimate, Estimate]]) -> dict[str, Estimate]:
    """Return slope, slope_corrected, correlation, sign_agreement and coverage by name.

    Args:
        pairs: The (prediction, truth) of each measured step. Pairs with a nan value on either side are dropped.

    Returns:
        Estimates whose `num_samples` is the number of pairs that they use.
    """
    rows = [
        [prediction.value, prediction.stderr, prediction.num_samples, truth.value, truth.stderr]
        for prediction, truth in pairs
        if not (math.isnan(prediction.value) or math.isnan(truth.value))
    ]
    table = np.array(rows, dtype=float).reshape(-1, 5)
    prediction, stderr, _, truth, truth_stderr = table.T
    with_bars = ~(np.isnan(stderr) | np.isnan(truth_stderr))
    covered = [interval_covers(p - t, s, int(n), tau) for p, s, n, t, tau in table[with_bars].tolist()]
    p = prediction[with_bars]
    t = truth[with_bars]
    s = stderr[with_bars]
    return {
        "slope": _estimate(_ratio, [prediction * truth, prediction**2], ALL_ZERO),
        "slope_corrected": _estimate(_ratio, [p * t, p**2 - s**2], NO_NOISE_LEFT, NO_ERROR_BARS),
        "correlation": _estimate(
            _pearson,
            [np.ones_like(truth), prediction, truth, prediction**2, truth**2, prediction * truth],
            NO_SPREAD,
        ),
        "sign_agreement": _share((prediction * truth > 0).astype(float)),
        "coverage": _share(np.array(covered, dtype=float), NO_ERROR_BARS),
    }


def _ratio(sums: np.ndarray) -> np.ndarray:
    """Return sums[..., 0] / sums[..., 1]; nan if the denominator is not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[..., 1] > 0, sums[..., 0] / sums[..., 1], np.nan)


def _pearson(sums: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation from the sums of 1, x, y, x², y² and xy in the last dimension."""
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        var_x = xx - x**2 / n
        var_y = yy - y**2 / n
        spread = (var_x > 1e-12 * xx) & (var_y > 1e-12 * yy)  # rounding differences of equal numbers are no spread
        return np.where(spread, (xy - x * y / n) / np.sqrt(var_x * var_y), np.nan)


def _share(hits: np.ndarray, needs: str = "") -> Estimate:
    return _estimate(_ratio, [hits, np.ones_like(hits)], NO_HITS, needs)


def _estimate(
    statistic: Callable[[np.ndarray], np.ndarray], columns: list[np.ndarray], reason: Unavailable, needs: str = ""
) -> Estimate:
    """Return statistic(sums over pairs) with its delete-one-pair jackknife error.

    Args:
        statistic: Maps (..., columns) sums to (...) values.
        columns: The terms whose sums the statistic takes, (pairs,) each.
        reason: The reason to give if the statistic is nan.
        needs: What pairs must have to count; added to the message about too few pairs.
    """
    terms = np.stack(columns, axis=1)
    num_pairs = len(terms)
    sums = terms.sum(axis=0)
    if num_pairs < MIN_PAIRS:
        detail = f" ({needs})" if needs else ""
        few = FEW_PAIRS.formatted(count=num_pairs, least=MIN_PAIRS, detail=detail)
        return Estimate(math.nan, num_samples=num_pairs, reason=few)
    value = float(statistic(sums))
    stderr = math.sqrt(num_pairs - 1) * float(statistic(sums - terms).std())  # row l lacks pair l
    if math.isnan(value):
        return Estimate(value, stderr, num_pairs, reason)
    if math.isnan(stderr):
        return Estimate(value, stderr, num_pairs, reason.prefixed("no error bar: without one pair"))
    return Estimate(value, stderr, num_pairs)
