"""Whole-prompt folds, leaving one out, and the delete-one-fold jackknife. Pure functions.

An inner product X·δθ of two estimates from the same batch is biased, because they share their noise. Split the batch
into folds of whole prompts, take X_k from fold k and the step δθ_(−k) from all the others, and the bias is gone:

    δH = Σ_k n_k X_k · δθ_(−k) / Σ_k n_k

With several ranks each rank's prompts are folds of their own, and g_(−k) = (N g − n_k g_k) / (N − n_k) needs only the
all-reduced mean g and this rank's g_k: no communication.

Everything reported is a smooth function f of sums over folds, s = Σ_k s_k (sums of entropies, of lengths, of inner
products), so one jackknife serves all: with s_(−l) the sums without fold l,

    se² = (K−1)/K Σ_l (f(s_(−l)) − mean_l f(s_(−l)))²         K folds over all ranks.

Source: Efron & Stein 1981, "The jackknife estimate of variance".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def leave_fold_out(mean: Tensor, folds: Tensor, fold_sizes: Tensor, total_size: float) -> Tensor:
    """Returns g_(−k) = (N g − n_k g_k) / (N − n_k) for each fold k, shaped like `folds`.

    mean        g: the mean over ALL folds of all ranks
    folds       (K, *g.shape), g_k: the mean over fold k, this rank's folds only
    fold_sizes  (K,), n_k
    total_size  N = Σ n over all ranks; ValueError when a fold is everything there is
    """
    if float(fold_sizes.max()) >= total_size:
        raise ValueError("a fold holds the whole batch: nothing is left when it is left out")
    sizes = fold_sizes.to(folds.dtype).view(-1, *(1 for _ in mean.shape))
    others = total_size - sizes
    return torch.addcmul(folds * (-sizes / others), total_size / others, mean)  # in the hot path: two passes


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


def response_number(prompt_index: Tensor) -> Tensor:
    """Returns, for each sequence, how many earlier sequences answer the same prompt: 0 for a prompt's first response.

    Example: response_number([7, 7, 3, 7, 3]) == [0, 1, 0, 2, 1]
    """
    order = prompt_index.argsort(stable=True)
    _, sizes = prompt_index[order].unique_consecutive(return_counts=True)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    number = torch.empty_like(order)
    number[order] = torch.arange(len(prompt_index), device=prompt_index.device) - starts
    return number


def split_prompts(prompt_index: Tensor, num_folds: int) -> Tensor:
    """Returns a fold number for each sequence, such that no prompt is split: at most num_folds contiguous groups."""
    prompts, group = prompt_index.unique(return_inverse=True)
    return group * min(num_folds, len(prompts)) // len(prompts)
