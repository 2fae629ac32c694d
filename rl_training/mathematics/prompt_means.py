"""Means over prompts with standard errors that count a prompt once, however many responses it has.

Responses to one prompt are not independent; prompts are. So every quantity is first summed within its prompt, and the
standard error is that over P prompts, of a mean

    x̄ = Σ x_p / P,      se² = Σ (x_p − x̄)² / (P (P−1)),

and of a ratio of sums (entropy per token: nats of all prompts over tokens of all prompts) by the delete-one-prompt
jackknife. It speaks of prompts like these, not of these alone: the spread between prompts is part of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.jackknife import jackknife_stderr

ONE_PROMPT = "one prompt has no standard error"


def mean_over_prompts(values: Tensor) -> Estimate:
    """Returns the mean of (P,) values with its standard error; a prompt with nan has no such value and is left out."""
    values = values.double()
    values = values[~values.isnan()]
    if len(values) == 0:
        return Estimate.missing("no prompt has such a value")
    if len(values) == 1:
        return Estimate(float(values), num_samples=1, reason=ONE_PROMPT)
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(len(values))), len(values))


def ratio_over_prompts(numerators: Tensor, denominators: Tensor) -> Estimate:
    """Returns Σ numerators / Σ denominators, both (P,), with its jackknife standard error over prompts."""
    sums = torch.stack([numerators, denominators], dim=1).double()
    total = sums.sum(dim=0)
    if total[1] == 0:
        return Estimate.missing("its denominator is 0 over all prompts")

    def ratio(s: Tensor) -> Tensor:
        return s[..., 0] / s[..., 1]

    if len(sums) == 1:
        return Estimate(float(ratio(total)), num_samples=1, reason=ONE_PROMPT)
    stderr = jackknife_stderr(ratio, total, total - sums, reduce=lambda tensor: tensor)
    return Estimate(float(ratio(total)), float(stderr), len(sums))
