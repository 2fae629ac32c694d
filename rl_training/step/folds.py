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
    rows_per_pass: tuple[range, ...]


def plan_folds(
    sizes: Sequence[int],
    responses_per_prompt: int,
    num_ranks: int = 1,
    num_folds: int | None = None,
    sizes_of_ranks: Sequence[Sequence[int]] | None = None,
    auto_slice: bool = False,
    by_rank: bool = False,
) -> list[FoldGroup]:
    """Plan the folds of a step: sets of whole prompts over all ranks.

    A unit is the smallest number of consecutive microbatches that end with a whole prompt on every rank. A fold is one
    or several units of all ranks. If there are too few units, each group of ranks gets a separate fold. If `num_folds`
    or `auto_slice` asks for more, microbatches are cut into slices of whole prompts, each of which takes another pass.

    With `by_rank` and enough ranks, a fold is all microbatches of a rank or of a group of ranks instead. A further pass
    then serves all folds at once, and it does not matter how a rank's prompts are spread over its microbatches.

    Args:
        sizes: Sequences of each microbatch on this rank. A prompt's responses are consecutive.
        responses_per_prompt: G.
        num_ranks: Number of ranks.
        num_folds: Number of folds over all ranks. None: at least DEFAULT_NUM_FOLDS, if that takes no pass beyond the
            loop's own.
        sizes_of_ranks: `sizes` of every rank. None if they are all alike.
        auto_slice: With num_folds=None: cut microbatches into slices if whole ones are too few for an error bar.
        by_rank: Prefer folds of ranks, if ranks can be divided into `num_folds` groups, or at least DEFAULT_NUM_FOLDS.

    Returns:
        Groups of folds. All ranks have equally many groups and passes.

    Raises:
        UserError: `num_folds` is impossible; the message names a number that works.

    >>> [(group.folds, group.rows_per_pass) for group in plan_folds([4, 4, 4, 4], responses_per_prompt=8)]
    [(range(0, 1), (range(0, 4), range(4, 8))), (range(1, 2), (range(8, 12), range(12, 16)))]
    """
    sizes_of_ranks = sizes_of_ranks or [sizes]
    ends = zip(*map(itertools.accumulate, sizes_of_ranks), strict=True)
    ends_unit = [all(end % responses_per_prompt == 0 for end in ends_of_ranks) for ends_of_ranks in ends]
    ends_unit[-1] = True  # if the last prompt is incomplete, this is noticed once the sequences are known
    rows = ranges_of(sizes)
    num_rank_folds = _num_rank_folds(num_ranks, num_folds) if by_rank else 0
    if num_rank_folds:
        return [FoldGroup(range(num_rank_folds), _groups_of_ranks(num_ranks, num_rank_folds), rows)]
    units = []
    first = 0
    for index, is_last in enumerate(ends_unit):
        if is_last:
            units.append(rows[first : index + 1])
            first = index + 1
    num_prompts = min(map(min, sizes_of_ranks)) // responses_per_prompt
    num_rank_groups, num_slices = _rank_groups_and_slices(len(units), len(sizes), num_prompts, num_ranks, num_folds)
    if auto_slice and num_folds is None and len(units) == len(sizes):
        num_slices = _slices_for_an_error_bar(num_rank_groups * len(units), len(units) * num_ranks, num_prompts)
    if num_slices > 1:
        slices = [part for microbatch in rows for part in _slices(microbatch, num_slices, responses_per_prompt)]
        fold_of_rank = tuple(range(num_ranks))
        return [FoldGroup(_folds_of(index, num_ranks), fold_of_rank, (part,)) for index, part in enumerate(slices)]
    if num_rank_groups > 1:
        fold_of_rank = _groups_of_ranks(num_ranks, num_rank_groups)
        return [FoldGroup(_folds_of(index, num_rank_groups), fold_of_rank, unit) for index, unit in enumerate(units)]
    num_groups = len(units) // max(1, len(units) // DEFAULT_NUM_FOLDS) if num_folds is None else num_folds
    bounds = [index * len(units) // num_groups for index in range(num_groups + 1)]
    return [
        FoldGroup(_folds_of(index, 1), (0,) * num_ranks, tuple(itertools.chain.from_iterable(units[start:stop])))
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def _groups_of_ranks(num_ranks: int, num_groups: int) -> tuple[int, ...]:
    """Return each rank's group. Groups are neighbouring ranks, equally many in each."""
    return tuple(rank * num_groups // num_ranks for rank in range(num_ranks))


def _num_rank_folds(num_ranks: int, num_folds: int | None) -> int:
    """Return the number of folds if each is a rank or a group of ranks; 0 if ranks cannot be divided like that.

    >>> [_num_rank_folds(num_ranks, None) for num_ranks in (4, 8, 12, 17, 64)]
    [0, 8, 12, 0, 8]
    """
    wanted = range(DEFAULT_NUM_FOLDS, 2 * DEFAULT_NUM_FOLDS) if num_folds is None else [num_folds]
    return next((number for number in wanted if number > 1 and num_ranks % number == 0), 0)


def _folds_of(group: int, folds_per_group: int) -> range:
    return range(group * folds_per_group, (group + 1) * folds_per_group)


def _slices(microbatch: range, num_slices: int, responses_per_prompt: int) -> list[range]:
    num_prompts = len(microbatch) // responses_per_prompt
    bounds = [num_prompts * j // num_slices * responses_per_prompt for j in range(num_slices + 1)]
    return [microbatch[start:stop] for start, stop in itertools.pairwise(bounds)]


def _rank_groups_and_slices(
    num_units: int, num_microbatches: int, num_prompts: int, num_ranks: int, num_folds: int | None
) -> tuple[int, int]:
    """Return the number of rank groups with a separate fold per unit, and the number of slices per microbatch."""
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    if num_folds is None:
        return next((groups for groups in divisors if groups * num_units >= DEFAULT_NUM_FOLDS), num_ranks), 1
    if num_folds <= num_units:
        return 1, 1
    possible = {groups * num_units: (groups, 1) for groups in divisors}
    if num_units == num_microbatches:
        possible |= {slices * num_ranks * num_units: (num_ranks, slices) for slices in range(2, num_prompts + 1)}
    if num_folds not in possible:
        fitting = max(number for number in possible if number <= num_folds)
        raise UserError(
            f"num_folds={num_folds} cannot cut {num_microbatches} microbatches of {num_prompts} prompts on each of "
            f"{num_ranks} processes into folds of whole prompts: "
            + (f"use num_folds={fitting}" if fitting > 1 else "leave num_folds out, and put more prompts into a step")
        )
    return possible[num_folds]


def _slices_for_an_error_bar(num_folds: int, num_microbatches: int, num_prompts: int) -> int:
    """Return the number of slices per microbatch that gives a step enough folds for an error bar.

    Args:
        num_folds: Number of folds without slices.
        num_microbatches: Number of microbatches on all ranks.
        num_prompts: Prompts per microbatch.

    Returns:
        The fewest that give DEFAULT_NUM_FOLDS folds. 1 if none are needed, or if even single prompts are too few.
    """
    if num_folds >= MIN_FOLDS_STEP or num_prompts * num_microbatches < MIN_FOLDS_STEP:
        return 1
    return min(num_prompts, -(-DEFAULT_NUM_FOLDS // num_microbatches))


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
        divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
        possible = [*range(1, num_prompts + 1), *(groups * num_prompts for groups in divisors)]
        num_folds = max(number for number in possible if number <= num_folds)
    groups = plan_folds([1] * num_prompts, 1, num_ranks, num_folds)  # as if each prompt were a microbatch
    return [dataclasses.replace(group, rows_per_pass=()) for group in groups]


def folds_of_prompts(prompt_index: Tensor, groups: Sequence[FoldGroup], rank: int = 0) -> Tensor:
    """Assign a rank's sequences to folds, (B,), so that no prompt is in two folds.

    Args:
        prompt_index: (B,), equal for responses to the same prompt.
        groups: From `plan_prompt_folds`. Their numbers of this rank's prompts differ by at most one.
        rank: This rank's number.

    >>> folds_of_prompts(torch.tensor([4, 9, 6, 4]), plan_prompt_folds(3, num_folds=2))
    tensor([0, 1, 0, 0])
    """
    prompts, prompt_of_row = prompt_index.unique(return_inverse=True)
    folds = [group.folds[group.fold_of_rank[rank]] for group in groups]
    return torch.tensor(folds, device=prompt_of_row.device)[prompt_of_row * len(groups) // len(prompts)]
