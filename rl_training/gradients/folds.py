"""Whole-prompt folds, and means that leave one fold out.

An inner product X·δθ of two estimates from the same batch is biased, because they share their noise. Split the batch
into folds of whole prompts, take X_k from fold k and the step δθ_(−k) from all other folds, and the bias is gone:

    δH = Σ_k n_k X_k · δθ_(−k) / Σ_k n_k

A fold may consist of several microbatches, or of the same microbatch on all or some ranks, provided that no prompt is
in two folds. g_(−k) = (N g − n_k g_k) / (N − n_k) is calculated on the ranks that keep the entries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.statistics.estimate import MIN_FOLDS_STEP

DEFAULT_NUM_FOLDS = 8  # enough folds for a reliable error bar


def leave_out_coefficients(fold_sizes: Tensor, total_size: float | None = None) -> tuple[Tensor, Tensor]:
    """Return a_k = N / (N − n_k) and b_k = −n_k / (N − n_k), (F,) each: the mean without fold k is a_k g + b_k g_k.

    Args:
        fold_sizes: (F,), n_k.
        total_size: N. None for the sum of `fold_sizes`.

    Raises:
        ValueError: One fold holds everything.

    >>> leave_out_coefficients(torch.tensor([1.0, 3.0]))
    (tensor([1.3333, 4.0000]), tensor([-0.3333, -3.0000]))
    """
    total = fold_sizes.sum() if total_size is None else total_size
    others = total - fold_sizes
    if float(others.min()) <= 0.0:
        raise ValueError("a fold holds the whole batch: nothing is left when it is left out")
    return total / others, -fold_sizes / others


def ranges_of(sizes: Sequence[int]) -> tuple[range, ...]:
    """Return the row range of each part, for parts that follow one another.

    >>> ranges_of([2, 3])
    (range(0, 2), range(2, 5))
    """
    ends = [0, *itertools.accumulate(sizes)]
    return tuple(range(a, b) for a, b in itertools.pairwise(ends))


@dataclass(frozen=True)
class FoldGroup:
    """Folds whose gradients come from the same backwards: one fold, or one per group of equally many ranks."""

    folds: range  # numbers of the folds
    fold_of_rank: tuple[int, ...]  # each rank's fold, counted from the first of `folds`
    # This rank's rows in each backward. All ranks have equally many backwards; () if a backward mixes prompts of folds.
    passes: tuple[range, ...]


def plan_folds(
    sizes: Sequence[int],
    responses_per_prompt: int,
    num_ranks: int = 1,
    num_folds: int | None = None,
    sizes_of_ranks: Sequence[Sequence[int]] | None = None,
    cut: bool = False,
) -> list[FoldGroup]:
    """Plan the folds of a step: sets of whole prompts over all ranks.

    A unit is the smallest number of consecutive microbatches that end with a whole prompt on every rank. A fold is one
    or several units of all ranks. If there are too few units, each group of ranks gets a separate fold. If `num_folds`
    or `cut` asks for more, microbatches are cut into slices of whole prompts, each of which takes a separate pass.

    Args:
        sizes: Sequences of each microbatch on this rank. A prompt's responses are consecutive.
        responses_per_prompt: G.
        num_ranks: Number of ranks.
        num_folds: Number of folds over all ranks. None: at least DEFAULT_NUM_FOLDS, if that takes no pass beyond the
            loop's own.
        sizes_of_ranks: `sizes` of every rank. None if they are all alike.
        cut: With num_folds=None: cut microbatches into slices if whole ones are too few for an error bar.

    Returns:
        Groups of folds. All ranks have equally many groups and passes.

    Raises:
        UserError: `num_folds` is impossible; the message names a number that works.

    >>> [(group.folds, group.passes) for group in plan_folds([4, 4, 4, 4], responses_per_prompt=8)]
    [(range(0, 1), (range(0, 4), range(4, 8))), (range(1, 2), (range(8, 12), range(12, 16)))]
    """
    of_ranks = sizes_of_ranks or [sizes]
    ends = zip(*map(itertools.accumulate, of_ranks), strict=True)
    last_of_unit = [all(end % responses_per_prompt == 0 for end in of_microbatch) for of_microbatch in ends]
    last_of_unit[-1] = True  # if the last prompt is incomplete, this is noticed once the sequences are known
    rows = ranges_of(sizes)
    units = []
    begin = 0
    for number, is_last in enumerate(last_of_unit):
        if is_last:
            units.append(rows[begin : number + 1])
            begin = number + 1
    prompts = min(map(min, of_ranks)) // responses_per_prompt
    parts, slices = _parts_and_slices(len(units), len(sizes), prompts, num_ranks, num_folds)
    if cut and num_folds is None and len(units) == len(sizes):
        slices = _slices_for_an_error_bar(parts * len(units), len(units) * num_ranks, prompts)
    if slices > 1:
        pieces = [piece for microbatch in rows for piece in _slices(microbatch, slices, responses_per_prompt)]
        fold_of_rank = tuple(range(num_ranks))
        return [FoldGroup(_after(number, num_ranks), fold_of_rank, (piece,)) for number, piece in enumerate(pieces)]
    if parts > 1:
        part_of_rank = tuple(rank * parts // num_ranks for rank in range(num_ranks))
        return [FoldGroup(_after(number, parts), part_of_rank, unit) for number, unit in enumerate(units)]
    wanted = len(units) // max(1, len(units) // DEFAULT_NUM_FOLDS) if num_folds is None else num_folds
    bounds = [fold * len(units) // wanted for fold in range(wanted + 1)]
    return [
        FoldGroup(_after(number, 1), (0,) * num_ranks, tuple(itertools.chain.from_iterable(units[first:last])))
        for number, (first, last) in enumerate(itertools.pairwise(bounds))
    ]


def _after(number: int, count: int) -> range:
    return range(number * count, (number + 1) * count)


def _slices(microbatch: range, slices: int, responses_per_prompt: int) -> list[range]:
    ends = [len(microbatch) // responses_per_prompt * j // slices * responses_per_prompt for j in range(slices + 1)]
    return [microbatch[first:last] for first, last in itertools.pairwise(ends)]


def _parts_and_slices(
    units: int, microbatches: int, prompts: int, num_ranks: int, num_folds: int | None
) -> tuple[int, int]:
    """Return the number of rank groups with a separate fold per unit, and the number of slices per microbatch."""
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    if num_folds is None:
        return next((parts for parts in divisors if parts * units >= DEFAULT_NUM_FOLDS), num_ranks), 1
    if num_folds <= units:
        return 1, 1
    possible = {parts * units: (parts, 1) for parts in divisors}
    if units == microbatches:
        possible |= {slices * num_ranks * units: (num_ranks, slices) for slices in range(2, prompts + 1)}
    if num_folds not in possible:
        fitting = max(number for number in possible if number <= num_folds)
        raise UserError(
            f"num_folds={num_folds} cannot cut {microbatches} microbatches of {prompts} prompts on each of {num_ranks} "
            f"processes into folds of whole prompts: "
            + (f"use num_folds={fitting}" if fitting > 1 else "leave num_folds out, and put more prompts into a step")
        )
    return possible[num_folds]


def _slices_for_an_error_bar(folds: int, microbatches: int, prompts: int) -> int:
    """Return the number of slices per microbatch that gives a step enough folds for an error bar.

    Args:
        folds: Number of folds without slices.
        microbatches: Number of microbatches on all ranks.
        prompts: Prompts per microbatch.

    Returns:
        The fewest that give DEFAULT_NUM_FOLDS folds. 1 if none are needed, or if even single prompts are too few.
    """
    if folds >= MIN_FOLDS_STEP or prompts * microbatches < MIN_FOLDS_STEP:
        return 1
    return min(prompts, -(-DEFAULT_NUM_FOLDS // microbatches))


def plan_prompt_folds(num_prompts: int, num_ranks: int = 1, num_folds: int | None = None) -> list[FoldGroup]:
    """Plan the folds of a step whose prompts are spread over its microbatches: still sets of whole prompts.

    They serve estimates that run further passes, over sequences in any order. Microbatches' gradients are not split.

    Args:
        num_prompts: Prompts per rank; the smallest number over ranks.
        num_ranks: Number of ranks.
        num_folds: Number of folds over all ranks. An impossible number is lowered to a possible one. None: `plan_folds`
            chooses.

    Returns:
        Groups without passes. Ranks share each fold if they have enough prompts.

    >>> [(group.folds, group.fold_of_rank) for group in plan_prompt_folds(num_prompts=4, num_ranks=2, num_folds=3)]
    [(range(0, 1), (0, 0)), (range(1, 2), (0, 0)), (range(2, 3), (0, 0))]
    """
    if num_folds is not None:
        divisors = [parts for parts in range(1, num_ranks + 1) if num_ranks % parts == 0]
        possible = [*range(1, num_prompts + 1), *(parts * num_prompts for parts in divisors)]
        num_folds = max(number for number in possible if number <= num_folds)
    groups = plan_folds([1] * num_prompts, 1, num_ranks, num_folds)  # as if each prompt were a microbatch
    return [dataclasses.replace(group, passes=()) for group in groups]


def folds_of_prompts(prompt_index: Tensor, groups: Sequence[FoldGroup], rank: int = 0) -> Tensor:
    """Assign a rank's sequences to folds, (B,), so that no prompt is in two folds.

    Args:
        prompt_index: (B,), equal for responses to the same prompt.
        groups: From `plan_prompt_folds`. Their numbers of this rank's prompts differ by at most one.
        rank: This rank's number.

    >>> folds_of_prompts(torch.tensor([4, 9, 6, 4]), plan_prompt_folds(3, num_folds=2))
    tensor([0, 1, 0, 0])
    """
    prompts, place = prompt_index.unique(return_inverse=True)
    folds = [group.folds[group.fold_of_rank[rank]] for group in groups]
    return torch.tensor(folds, device=place.device)[place * len(groups) // len(prompts)]
