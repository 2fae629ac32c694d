"""How well predictions match the truth: slope, correlation, sign agreement and coverage over the steps so far.

From n pairs of a prediction p (standard error s, ν degrees of freedom) and the truth t (standard error τ) of the same
step:

    slope            Σ p t / Σ p²            of the truth on the prediction, through the origin; 1 when they agree.
                                             Noise in p makes it smaller than 1
    slope_corrected  Σ p t / Σ (p² − s²)     the same with the noise of p taken out: E p² = (E p)² + s²
    correlation      Pearson's, of p and t
    sign_agreement   share of pairs with p t > 0
    coverage         share of pairs with |p − t| ≤ q √(s² + τ²): 0.95 when the error bars are honest

q is the 97.5 % quantile of Student's t with Welch's degrees of freedom ν (1 + τ²/s²)²; the truth has hundreds,
which count as infinitely many. Standard errors are the delete-one jackknife over pairs, jackknife.py: steps share
momentum, but the noise of p and of t is fresh at every step, and that is most of the scatter.

Sources: Fuller 1987, "Measurement error models", ch. 1 (the correction); Welch 1947 (the degrees of freedom).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor

from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.jackknife import jackknife_stderr

MIN_PAIRS = MIN_FOLDS_FOR_STDERR  # fewer make a line through any cloud
NO_NOISE_LEFT = "the predictions are smaller than their own error bars: without their noise nothing is left"
ALL_ZERO = "all predictions are zero"
NO_SPREAD = "all predictions, or all truths, are the same number"
NO_ERROR_BARS = "needs the standard errors of prediction and truth"


def interval_covers(difference: float, stderr: float, num_samples: int, other_stderr: float) -> float:
    """Returns 1 when the 95 % interval of this difference includes 0, else 0; nan without both standard errors.

    stderr        of one of the two, with num_samples − 1 degrees of freedom
    other_stderr  of the other, with infinitely many
    """
    if math.isnan(stderr) or math.isnan(other_stderr):
        return math.nan
    freedom = (num_samples - 1) * (1 + (other_stderr / stderr) ** 2) ** 2 if stderr else math.inf
    quantile = float(ndtri(0.975) if math.isinf(freedom) else stdtrit(freedom, 0.975))
    return float(abs(difference) <= quantile * math.hypot(stderr, other_stderr))


class Calibration:
    """Pairs of predictions and truths, accumulated, and the calibration of the predictions.

    A pair with a nan on either side is left out. `num_samples` of each estimate is the number of pairs behind it.
    """

    def __init__(self) -> None:
        self._pairs = torch.zeros(0, 5, dtype=torch.float64)  # prediction, its stderr, num_samples, truth, its stderr

    def add(self, prediction: Estimate, truth: Estimate) -> None:
        """Adds a pair for the same quantity and the same step."""
        if math.isnan(prediction.value) or math.isnan(truth.value):
            return
        pair = [prediction.value, prediction.stderr, prediction.num_samples, truth.value, truth.stderr]
        self._pairs = torch.cat([self._pairs, self._pairs.new_tensor([pair])])

    def estimates(self) -> dict[str, Estimate]:
        """Returns slope, slope_corrected, correlation, sign_agreement and coverage over all pairs so far."""
        prediction, stderr, _, truth, truth_stderr = self._pairs.unbind(dim=1)
        with_bars = ~(stderr.isnan() | truth_stderr.isnan())
        covered = [interval_covers(p - t, s, int(n), tau) for p, s, n, t, tau in self._pairs[with_bars].tolist()]
        p, t, s = prediction[with_bars], truth[with_bars], stderr[with_bars]
        return {
            "slope": _estimate(_ratio, [prediction * truth, prediction.square()], ALL_ZERO),
            "slope_corrected": _estimate(_ratio, [p * t, p.square() - s.square()], NO_NOISE_LEFT, NO_ERROR_BARS),
            "correlation": _estimate(
                _pearson,
                [torch.ones_like(truth), prediction, truth, prediction.square(), truth.square(), prediction * truth],
                NO_SPREAD,
            ),
            "sign_agreement": _share((prediction * truth > 0).double()),
            "coverage": _share(self._pairs.new_tensor(covered), NO_ERROR_BARS),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Returns all pairs as one tensor."""
        return {"pairs": self._pairs}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` returned."""
        if state["pairs"].shape[1:] != self._pairs.shape[1:]:
            raise ValueError(f"pairs has shape {tuple(state['pairs'].shape)}, not (N, {self._pairs.shape[1]})")
        self._pairs = state["pairs"].cpu()


def _ratio(sums: Tensor) -> Tensor:
    """Returns (..., 1): the first sum over the second, nan where the second is not positive."""
    return torch.where(sums[..., 1:] > 0, sums[..., :1] / sums[..., 1:], torch.nan)


def _pearson(sums: Tensor) -> Tensor:
    """Returns (..., 1): the correlation, from the sums of 1, x, y, x², y², xy."""
    n, x, y, xx, yy, xy = sums.unbind(-1)
    var_x, var_y = xx - x.square() / n, yy - y.square() / n
    spread = (var_x > 1e-12 * xx) & (var_y > 1e-12 * yy)  # what rounding leaves of equal numbers is no spread
    return torch.where(spread, (xy - x * y / n) / (var_x * var_y).sqrt(), torch.nan).unsqueeze(-1)


def _share(hits: Tensor, needs: str = "") -> Estimate:
    return _estimate(_ratio, [hits, torch.ones_like(hits)], "", needs)


def _estimate(statistic: Callable[[Tensor], Tensor], columns: list[Tensor], why_not: str, needs: str = "") -> Estimate:
    """Returns statistic(sums over pairs) with its jackknife error, or nan: too few pairs, or `why_not`."""
    terms = torch.stack(columns, dim=1)
    num_pairs, sums = len(terms), terms.sum(dim=0)
    if num_pairs < MIN_PAIRS:
        detail = f" ({needs})" if needs else ""
        reason = f"{num_pairs} pairs of prediction and truth so far: at least {MIN_PAIRS} are needed{detail}"
        return Estimate(math.nan, num_samples=num_pairs, reason=reason)
    value = float(statistic(sums))
    stderr = float(jackknife_stderr(statistic, sums, sums - terms))
    reason = (
        why_not if math.isnan(value) else "" if not math.isnan(stderr) else f"no error bar: without one pair, {why_not}"
    )
    return Estimate(value, stderr, num_pairs, reason)
