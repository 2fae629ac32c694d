"""The delete-one jackknife of a smooth function of sums.

Everything reported is a smooth function f of sums over folds, s = Σ_k s_k (sums of entropies, of lengths, of inner
products), so one jackknife serves all: with s_(−l) the sums without fold l,

    se² = (K−1)/K Σ_l (f(s_(−l)) − mean_l f(s_(−l)))²         K folds over all ranks.

Source: Efron & Stein 1981, "The jackknife estimate of variance".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def jackknife_stderr(
    statistic: Callable[[Tensor], Tensor],
    sums: Tensor,
    sums_without: Tensor,
    reduce: Callable[[Tensor], Tensor],
) -> Tensor:
    """Returns the delete-one-fold jackknife standard error of statistic(sums), shaped like it.

    statistic     maps (..., m) sums to (..., q) values
    sums          (m,), over all folds of all ranks
    sums_without  (K, m), row l the sums without fold l; this rank's folds only
    reduce        sums a tensor over the ranks

    Example: the mean of x_1..x_K has statistic s ↦ s[0]/s[1] with s = (Σx, K), and se = sd(x)/√K.
    """
    full = statistic(sums)
    deviations = statistic(sums_without) - full  # centred, so that the square does not cancel
    count = reduce(sums.new_tensor(float(len(sums_without))))
    moments = reduce(torch.stack([deviations.sum(dim=0), deviations.square().sum(dim=0)]))
    variance = (count - 1) / count * (moments[1] - moments[0].square() / count)
    return variance.clamp(min=0).sqrt()  # exact zero may come out as −1e-30: rounding, not an estimate
