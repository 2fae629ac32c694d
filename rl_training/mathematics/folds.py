"""Whole-prompt folds, and leaving one out of a mean.

An inner product X·δθ of two estimates from the same batch is biased, because they share their noise. Split the batch
into folds of whole prompts, take X_k from fold k and the step δθ_(−k) from all the others, and the bias is gone:

    δH = Σ_k n_k X_k · δθ_(−k) / Σ_k n_k

With several ranks each rank's prompts are folds of their own, and g_(−k) = (N g − n_k g_k) / (N − n_k) needs only the
all-reduced mean g and this rank's g_k: no communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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


def ranges_of(sizes: Sequence[int]) -> tuple[range, ...]:
    """Returns the rows of parts that lie one after another.

    >>> ranges_of([2, 3])
    (range(0, 2), range(2, 5))
    """
    ends = [0, *itertools.accumulate(sizes)]
    return tuple(range(a, b) for a, b in itertools.pairwise(ends))


def fold_ranges(microbatch_sizes: Sequence[int], num_folds: int, responses_per_prompt: int) -> tuple[range, ...]:
    """Returns the rows of each fold, for microbatches of whole prompts that lie one after another.

    Up to one fold per microbatch, a fold is one or several microbatches in a row; beyond, each microbatch is cut into
    slices of whole prompts. ValueError, naming a number that would do, when that is impossible.

    >>> fold_ranges([8, 8], 4, responses_per_prompt=2)
    (range(0, 4), range(4, 8), range(8, 12), range(12, 16))
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


def response_number(prompt_index: Tensor) -> Tensor:
    """Returns, for each sequence, how many earlier sequences answer the same prompt: 0 for a prompt's first response.

    >>> response_number(torch.tensor([7, 7, 3, 7, 3]))
    tensor([0, 1, 0, 2, 1])
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
