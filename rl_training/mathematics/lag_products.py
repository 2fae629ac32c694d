"""Products of the mean gradients of different steps, and what of the gradient persists over them. Pure functions.

With G_s the true gradient at step s and g_s its estimate from batch s, the products

    C_n = mean over s of g_s · g_{s−n},  n ≥ 1          C_0 = mean over s of |G_s|²^, unbiased (noise_scale.py)

have no noise of one batch squared in them. Batch s is sampled at θ_s whatever came before, so that the mean of
g_s · g_{s−n} is that of G_s · g_{s−n}: how far the gradient still goes the way that it was estimated n steps ago.
(θ_s has moved along the noise of g_{s−n} too; where the loss curves, that is in G_s, and a part of what is measured.)
From these the square of the mean of W = lags + 1 true gradients in a row, without the batches' noise:

    |Ḡ|² = |(G_s + … + G_{s−W+1}) / W|² = (C_0 + 2 Σ_{n<W} (1 − n/W) C_n) / W

It is |G|² where the gradient stays what it is, |G|²/W where it is drawn anew at each step, and less where it swings.

The error leaves out one batch at a time, with all products that it is in. Where there is signal that is right; where
all is noise it is up to √2 too wide, since each product then counts for both of its batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.mathematics.kish import kish_size
from rl_training.mathematics.noise_scale import Averages

STEP, TRACE, GRAD_SQ_NORM, FIRST_LAG = range(4)  # columns of a history


def persistence_weights(lags: int) -> Tensor:
    """Returns the weights of C_0 … C_lags in |Ḡ|², (lags + 1,) fp64.

    >>> persistence_weights(1).tolist()
    [0.5, 0.5]
    """
    window = lags + 1
    weights = 2.0 * (window - torch.arange(window, dtype=torch.float64)) / window**2
    weights[0] /= 2.0
    return weights


def lag_averages(history: Tensor, decay: float) -> tuple[Averages, list[Averages]]:
    """Returns the averages of (tr Σ, |Ḡ|²) over steps, and for each lag those of (tr Σ, C_n).

    history  (steps, FIRST_LAG + lags) fp64, oldest first: the number of the step, tr Σ^, |G|²^, and the products with
             the steps 1, 2, … before; nan where there is none. The weight of a step is decay^age

    What is known least, mostly the longest lag, says of how many steps |Ḡ|² is.
    """
    steps, table = history[:, STEP], history[:, TRACE:]
    known = table.isfinite()
    weights = decay ** torch.arange(len(table) - 1, -1, -1, dtype=table.dtype)
    counted = weights.unsqueeze(1) * known
    terms = counted * table.nan_to_num(0.0, 0.0, 0.0)
    lost, lost_weight = terms.clone(), counted.clone()  # with each batch
    for lag in range(1, table.shape[1] - 1):
        column = 1 + lag
        partner = (steps.unsqueeze(0) == steps.unsqueeze(1) + lag).to(terms)  # (batch, step): g_batch is in its product
        lost[:, column] += partner @ terms[:, column]
        lost_weight[:, column] += partner @ counted[:, column]
    sums, total = terms.sum(dim=0), counted.sum(dim=0)
    means = sums / total
    without = ((sums - lost) / (total - lost_weight))[known[:, 0]]
    of_lags = persistence_weights(table.shape[1] - 2)

    def averages(coefficients: Tensor, column: int) -> Averages:
        """Returns those of (tr Σ, a combination of columns), known as well as `column` is."""
        used = coefficients != 0  # another lag may have no product yet

        def pair(values: Tensor) -> Tensor:
            return torch.stack([values[..., 0], values[..., used] @ coefficients[used]], dim=-1)

        return _of_replicates(pair(means), pair(without), weights[known[:, column]])

    units = torch.eye(table.shape[1], dtype=table.dtype)
    least_known = int(total.argmin())
    persistent = averages(torch.cat([torch.zeros(1, dtype=table.dtype), of_lags]), least_known)
    return persistent, [averages(units[column], column) for column in range(2, table.shape[1])]


def _of_replicates(means: Tensor, without: Tensor, weights: Tensor) -> Averages:
    """Returns averages from what they would be without each batch, (batches, 2), and the weights of their terms."""
    count = len(without)
    deviations = without - without.mean(dim=0)
    ratios = without[:, 1] / without[:, 0]
    scale = (count - 1) / max(count, 1)
    return Averages(
        means=means,
        covariance=scale * deviations.T @ deviations,
        signal_to_noise_stderr=math.sqrt(scale * float((ratios - ratios.mean()).square().sum())),
        steps=kish_size(weights) if len(weights) else 0.0,
        degrees=max(kish_size(weights.square()) - 1.0, 0.0) if len(weights) else 0.0,
    )
