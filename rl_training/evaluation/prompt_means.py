"""Means over prompts, with standard errors that count each prompt once, whatever its number of responses.

Prompts are independent; responses to one prompt are not. So every quantity is first summed within its prompt, and the
standard error is taken over P prompts. For a mean,

    x̄ = Σ x_p / P,      se² = Σ (x_p − x̄)² / (P (P−1)).

For a ratio of sums (entropy per token: nats of all prompts over tokens of all prompts), it is the delete-one-prompt
jackknife's. It includes the spread between prompts: it is the error for prompts like these, not for these alone.

A share is a mean of values in [0, 1], and its interval lies there too. If x̄ ± t se leaves [0, 1], or has no width
because all prompts have the same value, the interval is Wilson's: all π with

    (x̄ − π)² ≤ q² π (1 − π) / n,

where n = x̄ (1 − x̄) / se² is the number of draws of 0 or 1 that would have this error, and q is the quantile of
Student's t with P − 1 degrees of freedom. If se = 0, n = P and q is normal: 20 prompts, all right, give .84 to 1.

Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference"; with the effective number
of draws Korn and Graubard 1998, "Confidence intervals for proportions with small expected number of positive counts".
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import jackknife_stderr
from rl_training.statistics.unavailable import Unavailable
from rl_training.statistics.welch import mean_of

ONE_PROMPT = Unavailable("one_prompt", "one prompt has no standard error")
ZERO_DENOMINATOR = Unavailable("zero_denominator", "its denominator is 0 over all prompts")


def mean_over_prompts(values: Tensor) -> Estimate:
    """Return the mean of (P,) values with its standard error, over the prompts whose value is not nan."""
    return mean_of(values[~values.isnan()].tolist())


def share_over_prompts(values: Tensor, least: float = 0.0, most: float = 1.0) -> Estimate:
    """Return the mean of (P,) values within [least, most], with an interval within the same range.

    If an end is infinite, the interval is Student's, cut at the finite end.
    """
    mean = mean_over_prompts(values)
    low, high = mean.bounds()
    if math.isnan(low) or (least <= low < high <= most):
        return mean
    span = most - least
    if math.isinf(span):  # no share: only the finite end is known
        return replace(mean, interval=(max(low, least), min(high, most)))
    low, high = _wilson((mean.value - least) / span, mean.stderr / span, mean.num_samples)
    return replace(mean, interval=(least + span * low, least + span * high))


def _wilson(share: float, stderr: float, num_prompts: int) -> tuple[float, float]:
    """Return Wilson's interval of a share with this standard error over `num_prompts` prompts."""
    draws = share * (1 - share) / stderr**2 if stderr else num_prompts
    quantile = float(stdtrit(num_prompts - 1, 0.975) if stderr else ndtri(0.975))
    shrink = quantile**2 / draws
    middle = (share + shrink / 2) / (1 + shrink)
    half = math.sqrt(shrink * share * (1 - share) + shrink**2 / 4) / (1 + shrink)
    return max(middle - half, 0.0), min(middle + half, 1.0)  # by rounding only


def ratio_over_prompts(numerators: Tensor, denominators: Tensor) -> Estimate:
    """Return Σ numerators / Σ denominators of (P,) values, with its delete-one-prompt jackknife error."""
    sums = torch.stack([numerators, denominators], dim=1).double()
    total = sums.sum(dim=0)
    if total[1] == 0:
        return Estimate.missing(ZERO_DENOMINATOR)

    def ratio(s: Tensor) -> Tensor:
        return s[..., 0] / s[..., 1]

    if len(sums) == 1:
        return Estimate(float(ratio(total)), num_samples=1, reason=ONE_PROMPT)
    stderr = jackknife_stderr(ratio, total, total - sums)
    return Estimate(float(ratio(total)), float(stderr), len(sums))
