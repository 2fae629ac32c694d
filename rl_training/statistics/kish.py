"""Kish's effective sample size: how many equally weighted sequences are worth as much as the weighted ones.

    n_eff = (Σ_i |w_i|)² / Σ_i w_i²  =  n / (1 + cv²)        cv: coefficient of variation of the n weights |w_i|

It is n if all weights are equal, and 1 if one has all the weight.

Source: Kish 1965, "Survey Sampling" (the loss of precision through unequal weights).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kish_sums(weights: Tensor) -> Tensor:
    """Return (Σ|w|, Σw²), (2,) fp64, of (n,) weights of any sign. These sums add up over microbatches and ranks."""
    magnitudes = weights.double().abs()
    return torch.stack([magnitudes.sum(), magnitudes.square().sum()])


def kish_size_of_sums(total: float, total_of_squares: float) -> float:
    """Return the effective sample size from the totals of `kish_sums`; nan if all weights are 0.

    Two ranks with the weights (1, 1) and (2,) have the sums (2, 2) and (2, 4), so the effective size is 4² / 6:

    >>> round(kish_size_of_sums(2 + 2, 2 + 4), 3)
    2.667
    """
    return total * total / total_of_squares if total_of_squares else math.nan


def kish_size(weights: Tensor) -> float:
    """Return the effective sample size of (n,) weights, between 1 and n; nan if all weights are 0.

    >>> [kish_size(torch.tensor(weights)) for weights in ([3.0, 3.0, 3.0], [0.0, 5.0, 0.0], [1.0, -3.0])]
    [3.0, 1.0, 1.6]
    """
    total, total_of_squares = kish_sums(weights).tolist()
    return kish_size_of_sums(total, total_of_squares)
