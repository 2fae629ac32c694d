"""Whole-prompt folds, their gradients, leaving one out, and the delete-one-fold jackknife.

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

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.gradients import GradientBuffer
from rl_training.types import Scores


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


def fill_slices(
    buffer: GradientBuffer,
    parameters: Mapping[str, nn.Parameter],
    folds: Sequence[range],
    microbatch_rows: Sequence[range],
    loss_weights: Tensor,
    score: Callable[[Tensor], Scores],
) -> None:
    """Splits each microbatch's gradient, which is in the row of its first fold, among the folds that cut it in slices.

    A slice's gradient comes from a forward and a backward of its own, that of the last slice from the difference: for
    s slices that costs (s − 1)/s of the training's own forward and backward. Without slices, nothing is done.
    """
    for microbatch in microbatch_rows:
        inside = [k for k, rows in enumerate(folds) if rows.start in microbatch and rows.stop <= microbatch.stop]
        if len(inside) < 2:
            continue
        rest = len(microbatch) * buffer.matrix[inside[0]]
        for k in inside[:-1]:
            rows = torch.arange(folds[k].start, folds[k].stop, device=loss_weights.device)
            logps = score(rows).logps
            weights = len(loss_weights) * loss_weights[rows, : logps.shape[1]]  # of a sum on the mean scale
            total = buffer.flatten(torch.autograd.grad(logps, list(parameters.values()), weights))
            buffer.matrix[k] = total / len(rows)
            rest -= total
        buffer.matrix[inside[-1]] = rest / len(folds[inside[-1]])


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


def ranges_of(sizes: Sequence[int]) -> tuple[range, ...]:
    """Returns the rows of parts that lie one after another: ranges_of([2, 3]) == (range(0, 2), range(2, 5))."""
    ends = [0, *itertools.accumulate(sizes)]
    return tuple(range(a, b) for a, b in itertools.pairwise(ends))


def fold_ranges(microbatch_sizes: Sequence[int], num_folds: int, responses_per_prompt: int) -> tuple[range, ...]:
    """Returns the rows of each fold, for microbatches of whole prompts that lie one after another.

    Up to one fold per microbatch, a fold is one or several microbatches in a row; beyond, each microbatch is cut into
    slices of whole prompts. ValueError, naming a number that would do, when that is impossible.

    Example: fold_ranges([8, 8], 4, responses_per_prompt=2) == (range(0, 4), range(4, 8), range(8, 12), range(12, 16))
    """
    num_microbatches, prompts = len(microbatch_sizes), min(microbatch_sizes) // responses_per_prompt
    if num_folds <= num_microbatches:
        bounds = [k * num_microbatches // num_folds for k in range(num_folds + 1)]
        return ranges_of([sum(microbatch_sizes[a:b]) for a, b in itertools.pairwise(bounds)])
    slices = num_folds // num_microbatches
    if num_folds % num_microbatches or slices > prompts:
        fitting = min(slices, prompts) * num_microbatches
        raise ValueError(
            f"num_folds={num_folds} cannot cut {num_microbatches} microbatches of {prompts} prompts into folds of "
            f"whole prompts: use num_folds={fitting}"
        )
    in_slices = []
    for size in microbatch_sizes:
        ends = [size // responses_per_prompt * j // slices * responses_per_prompt for j in range(slices + 1)]
        in_slices += [b - a for a, b in itertools.pairwise(ends)]
    return ranges_of(in_slices)


def fold_numbers(folds: Sequence[range]) -> Tensor:
    """Returns the fold of each row, (rows,): fold_numbers([range(0, 2), range(2, 3)]) == [0, 0, 1]."""
    return torch.repeat_interleave(torch.tensor([len(rows) for rows in folds]))


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
