"""The gradient noise scale, from square norms of the gradients of blocks and of the whole batch. Pure functions.

With G the true mean gradient and Σ the covariance of one independent unit's gradient, B_simple = tr Σ / |G|² is the
batch size at which noise and signal are equal. From the mean gradients g_b of M blocks of b units, and g_B of all
B = M b of them,

    |G|²^ = (B |g_B|² − b mean|g_b|²) / (B − b)         tr Σ^ = (mean|g_b|² − |g_B|²) / (1/b − 1/B).

Both are unbiased, so |G|²^ may be negative. Then the noise scale has no value, while its inverse |G|² / tr Σ, the
signal-to-noise ratio of one unit, always has one. The functions below estimate both from averages over steps.

Source: McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import MIN_UNITS_OFFLINE, jackknife_covariance, jackknife_stderr
from rl_training.statistics.kish import kish_size
from rl_training.statistics.running_pairs import fieller_interval
from rl_training.statistics.unavailable import Unavailable

BOUNDS = ("", "_low", "_high")  # a value and the ends of its 95 % interval
NOT_WARM = Unavailable(
    "not_warm",
    "no measured step has Adam's metric: its second moments had seen too few gradients",
)
LOST = Unavailable("lost_in_noise", "the averaged estimate of |G|² is not above 0: the gradient is lost in its noise")
NO_NOISE = Unavailable("no_gradient", "tr Σ and |G|² are both 0: no gradient at all")
NO_UPPER_END = "no error bar: |G|² may be 0, so that its interval, …_low to …_high, has no upper end"
FEW_STEPS = Unavailable("few_steps", f"no error bar: it needs {MIN_UNITS_OFFLINE} steps")
INTERVAL_END = "no error bar: the end of a 95 % interval"


def noise_moments(block_sq_norm: Tensor, batch_sq_norm: Tensor, block_size: float, batch_size: float) -> Tensor:
    """Return the unbiased estimates (tr Σ^, |G|²^), stacked in a new last dimension. |G|²^ may be negative.

    Args:
        block_sq_norm: The mean of |g_b|² over the blocks.
        batch_sq_norm: |g_B|².
        block_size: b, the number of units in a block.
        batch_size: B > b, the number of units in all blocks.

    Without noise, |g_b|² = |g_B|² = 4 gives

    >>> noise_moments(torch.tensor(4.0), torch.tensor(4.0), block_size=2, batch_size=8)
    tensor([0., 4.])
    """
    trace = (block_sq_norm - batch_sq_norm) / (1.0 / block_size - 1.0 / batch_size)
    grad_sq_norm = (batch_size * batch_sq_norm - block_size * block_sq_norm) / (batch_size - block_size)
    return torch.stack([trace, grad_sq_norm], dim=-1)


def split_trace(same_prompt: Tensor, moments: Tensor, responses_per_prompt: int) -> Tensor:
    """Split tr Σ into the noise between prompts and the noise within prompts.

    With r_i the gradient of response i on the mean scale and μ = E[g | prompt],

        within = E|g − μ|²,  falls as 1/G         between = E|μ|² − |G|²         E|μ|² = c (G−1)² / ((G−1)² + 1)

    The factor holds for Dr-GRPO, whose baseline is the group's mean: r_i = (R_i − R̄) ∂S_i. So R_j is in r_i and R_i is
    in r_j, and E[r_i·r_j] = ((1 − 1/G)² + 1/G²) |∂J|², while μ = (1 − 1/G) ∂J, with J the prompt's expected reward.

    Args:
        same_prompt: c, the mean of r_i·r_j over pairs of responses to one prompt.
        moments: (tr Σ^, |G|²^) from `noise_moments`, (…, 2).
        responses_per_prompt: G.

    Returns:
        (between, within), (…, 2): unbiased, and with the sum tr Σ^. Either may be negative.
    """
    trace, grad_sq_norm = moments.unbind(-1)
    square = (responses_per_prompt - 1) ** 2
    between = same_prompt * square / (square + 1) - grad_sq_norm
    return torch.stack([between, trace - between], dim=-1)


@dataclass(frozen=True)
class Averages:
    """Averages of tr Σ and |G|² over steps, with their joint covariance."""

    means: Tensor  # (2,), tr Σ and |G|²
    covariance: Tensor  # (2, 2), of the two means
    signal_to_noise_stderr: float  # standard error of |G|² / tr Σ
    steps: float  # the effective number of averaged steps
    degrees: float  # degrees of freedom of the covariance, for Student's t

    @property
    def signal_to_noise(self) -> float:
        """|G|² / tr Σ of one unit; nan if both are 0."""
        trace, grad_sq_norm = self.means
        return float(grad_sq_norm / trace)


def average(history: Tensor, decay: float, ages: Tensor) -> Averages:
    """Average (tr Σ, |G|²) over steps with weights w = decay^age, with the delete-one-step jackknife's covariance.

    Args:
        history: tr Σ and |G|² of each step, (steps, 2). Rows that are not finite are left out.
        decay: The weight of an optimizer step relative to the next one.
        ages: How many optimizer steps ago each row was measured, (steps,).

    The average is worth (Σw)²/Σw² equally weighted steps. Its variance is a sum with weights w², so its degrees of
    freedom are those of (Σw²)²/Σw⁴ equal terms (Satterthwaite 1946) minus one: 18 with decay .95.
    """
    finite = history.isfinite().all(dim=1)
    weights = (decay ** ages.to(history))[finite]
    rows = history[finite]
    if not len(rows):
        nan = torch.full((2, 2), torch.nan, dtype=history.dtype)
        return Averages(nan[0], nan, math.nan, 0.0, 0.0)
    terms = torch.cat([weights.unsqueeze(1) * rows, weights.unsqueeze(1)], dim=1)
    sums = terms.sum(dim=0)
    without = sums - terms
    return Averages(
        means=sums[:2] / sums[2],
        covariance=jackknife_covariance(lambda s: s[..., :2] / s[..., 2:], sums, without),
        signal_to_noise_stderr=float(jackknife_stderr(lambda s: s[..., 1] / s[..., 0], sums, without)),
        steps=kish_size(weights),
        degrees=kish_size(weights.square()) - 1.0,
    )


def signal_to_noise_interval(averages: Averages, coverage: float = 0.95) -> tuple[float, float]:
    """Return Fieller's interval of |G|² / tr Σ. Its ends may be negative, like the estimate.

    It is (−∞, ∞) if tr Σ itself may be 0. The interval of the noise scale is the same set inverted. It has no upper end
    if this set includes 0.
    """
    return fieller_interval(averages.means, averages.covariance, averages.degrees, coverage)


def noise_scale_interval(signal_to_noise: tuple[float, float]) -> tuple[float, float]:
    """Return the interval of tr Σ / |G|², positive values only. It ends at ∞ if |G|² = 0 cannot be ruled out.

    Example: noise_scale_interval((-0.01, 0.05)) == (20, inf).
    """
    low, high = (1.0 / end if end > 0 else math.inf for end in signal_to_noise)
    return high, low


def _averaged(averages: Averages, value: float, stderr: float) -> Estimate:
    """Return an average over steps; its error is given once there are enough steps."""
    if averages.steps == 0:
        return Estimate.missing(NOT_WARM)
    if math.isnan(value):
        return Estimate.missing(NO_NOISE)
    num_samples = int(averages.degrees) + 1
    if averages.steps < MIN_UNITS_OFFLINE:
        return Estimate(value, math.nan, num_samples, FEW_STEPS)
    return Estimate(value, stderr, num_samples)


def mean_estimates(averages: Averages) -> list[Estimate]:
    """Return the estimates of tr Σ and |G|²."""
    stderrs = averages.covariance.diagonal().sqrt().tolist()
    return [_averaged(averages, *pair) for pair in zip(averages.means.tolist(), stderrs, strict=True)]


def signal_to_noise_estimate(averages: Averages) -> Estimate:
    """Return |G|² / tr Σ, with a remark if it is negative: the ratio cannot be, but its unbiased estimate can."""
    ratio = _averaged(averages, averages.signal_to_noise, averages.signal_to_noise_stderr)
    if not ratio.value < 0:
        return ratio
    return dataclasses.replace(ratio, reason="; ".join(filter(None, [f"below 0: {LOST}", ratio.reason])))


def interval_end(averages: Averages, end: float) -> Estimate:
    """Return one end of an interval, which may be infinite; missing while there are too few steps for an error."""
    averaged = _averaged(averages, averages.signal_to_noise, 0.0)
    if math.isnan(averaged.stderr):
        return Estimate.missing(averaged.reason)
    return Estimate(end, num_samples=averaged.num_samples, reason=INTERVAL_END)


def noise_scale(averages: Averages) -> list[Estimate]:
    """Return tr Σ / |G|² in prompts and the ends of its interval. It has an error bar if the upper end is finite."""
    ends = noise_scale_interval(signal_to_noise_interval(averages))
    bounds = [interval_end(averages, end) for end in ends]
    ratio = averages.signal_to_noise
    scale = signal_to_noise_estimate(averages)
    if ratio <= 0:
        scale = Estimate.missing(LOST)
    elif not math.isnan(ratio):
        is_bounded = math.isfinite(ends[1])
        error = scale.stderr / ratio**2 if is_bounded else math.nan
        reason = scale.reason if is_bounded else NO_UPPER_END
        scale = Estimate(1.0 / ratio, error, scale.num_samples, scale.reason or reason)
    return [scale, *bounds]


def with_bounds(name: str, estimates: Sequence[Estimate], factor: float = 1.0) -> dict[str, Estimate]:
    """Return a value and the ends of its interval, times `factor`, under `name`, `name`_low and `name`_high."""
    return {
        f"{name}{suffix}": Estimate(
            estimate.value * factor, estimate.stderr * factor, estimate.num_samples, estimate.reason
        )
        for suffix, estimate in zip(BOUNDS, estimates, strict=True)
    }
