"""Whole-prompt folds, and means that leave one fold out.

An inner product X·δθ of two estimates from the same batch is biased, because they share their noise. Split the batch
into folds of whole prompts, take X_k from fold k and the step δθ_(−k) from all other folds, and the bias is gone:

    δH = Σ_k n_k X_k · δθ_(−k) / Σ_k n_k

A fold may consist of several microbatches, or of the same microbatch on all or some ranks, provided that no prompt is
in two folds. If microbatches are too few, or mix prompts, folds are of prompts instead, and further passes over the
step's sequences give their gradients.

g_(−k) = (N g − n_k g_k) / (N − n_k) is calculated on the ranks that keep the entries.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.statistics.jackknife import MIN_FOLDS_STEP

DEFAULT_NUM_FOLDS = 8  # enough folds for a reliable error bar


def ranges_of(sizes: Sequence[int]) -> tuple[range, ...]:
    """Return the row range of each part, for parts that follow one another.

    >>> ranges_of([2, 3])
    (range(0, 2), range(2, 5))
    """
    ends = [0, *itertools.accumulate(sizes)]
    return tuple(range(a, b) for a, b in itertools.pairwise(ends))


class FoldSource(enum.StrEnum):
    """What gives the gradients of a step's folds."""

    CAUGHT = "hooks on the loop's own backwards, which are for whole folds"
    RECOMPUTED = "further passes over folds of prompts, wherever these lie in the microbatches"
    MISSING = "nothing: microbatches do not hold whole folds, and further passes are impossible or not worth it"


@dataclass(frozen=True)
class FoldGroup:
    """Folds whose gradients come from the same backwards: one fold, or one for each rank group.

    A rank group is neighbouring ranks, equally many in each.
    """

    folds: range  # numbers of the folds
    fold_of_rank: tuple[int, ...]  # each rank's fold, counted from the first of `folds`
    # This rank's rows in each of the loop's backwards for these folds: equally many on all ranks, none if folds are of
    # prompts, wherever these lie.
    rows_per_pass: tuple[range, ...]


def plan_folds(
    sizes: Sequence[int],
    responses_per_prompt: int,
    num_ranks: int = 1,
    num_folds: int | None = None,
    sizes_of_ranks: Sequence[Sequence[int]] | None = None,
    by_rank: bool = False,
) -> list[FoldGroup]:
    """Plan the folds of a step: sets of whole prompts over all ranks, each with backwards of its own in the loop.

    A stretch is the shortest run of consecutive microbatches that ends with a whole prompt on every rank. A fold is one
    or several stretches of all ranks. If there are too few, each rank group gets separate folds.

    With `by_rank` and enough ranks, a fold is all microbatches of a rank or of a rank group instead. A further pass
    then serves all folds at once, and it does not matter how a rank's prompts are spread over its microbatches.

    Args:
        sizes: Sequences of each microbatch on this rank. A prompt's responses are consecutive.
        responses_per_prompt: G.
        num_ranks: Number of ranks.
        num_folds: Number of folds over all ranks, lowered if there are too few stretches. None: at least
            DEFAULT_NUM_FOLDS, if there are enough.
        sizes_of_ranks: `sizes` of every rank. None if they are all alike.
        by_rank: Prefer folds of ranks, if there can be `num_folds` rank groups, or at least DEFAULT_NUM_FOLDS.

    Returns:
        Fold groups. All ranks have equally many fold groups and passes.

    >>> [(group.folds, group.rows_per_pass) for group in plan_folds([4, 4, 4, 4], responses_per_prompt=8)]
    [(range(0, 1), (range(0, 4), range(4, 8))), (range(1, 2), (range(8, 12), range(12, 16)))]
    """
    sizes_of_ranks = sizes_of_ranks or [sizes]
    ends = zip(*map(itertools.accumulate, sizes_of_ranks), strict=True)
    ends_stretch = [all(end % responses_per_prompt == 0 for end in ends_of_ranks) for ends_of_ranks in ends]
    ends_stretch[-1] = True  # if the last prompt is incomplete, this is noticed once the sequences are known
    rows = ranges_of(sizes)
    num_rank_folds = _num_rank_folds(num_ranks, num_folds) if by_rank else 0
    if num_rank_folds:
        return [FoldGroup(range(num_rank_folds), _rank_groups(num_ranks, num_rank_folds), rows)]
    stretches = []
    first = 0
    for index, is_last in enumerate(ends_stretch):
        if is_last:
            stretches.append(rows[first : index + 1])
            first = index + 1
    num_rank_groups, num_parts = _rank_groups_and_parts(len(stretches), num_ranks, num_folds)
    bounds = [index * len(stretches) // num_parts for index in range(num_parts + 1)]
    rows_of_parts = [
        tuple(itertools.chain.from_iterable(stretches[start:stop])) for start, stop in itertools.pairwise(bounds)
    ]
    return _fold_groups(rows_of_parts, num_ranks, num_rank_groups)


def _fold_groups(rows_of_parts: Sequence[tuple[range, ...]], num_ranks: int, num_rank_groups: int) -> list[FoldGroup]:
    """Return the folds of each part of a step: one for each rank group.

    Args:
        rows_of_parts: This rank's rows in each backward of each part.
        num_ranks: Number of ranks.
        num_rank_groups: Number of rank groups.
    """
    fold_of_rank = _rank_groups(num_ranks, num_rank_groups)
    return [
        FoldGroup(range(index * num_rank_groups, (index + 1) * num_rank_groups), fold_of_rank, rows)
        for index, rows in enumerate(rows_of_parts)
    ]


def _rank_groups(num_ranks: int, num_rank_groups: int) -> tuple[int, ...]:
    """Return the rank group of each rank."""
    return tuple(rank * num_rank_groups // num_ranks for rank in range(num_ranks))


def _num_rank_folds(num_ranks: int, num_folds: int | None) -> int:
    """Return the number of folds if each is a rank or a rank group; 0 if ranks cannot be divided like that.

    >>> [_num_rank_folds(num_ranks, None) for num_ranks in (4, 8, 12, 17, 64)]
    [0, 8, 12, 0, 8]
    """
    wanted = range(DEFAULT_NUM_FOLDS, 2 * DEFAULT_NUM_FOLDS) if num_folds is None else [num_folds]
    return next((number for number in wanted if number > 1 and num_ranks % number == 0), 0)


def _rank_groups_and_parts(num_stretches: int, num_ranks: int, num_folds: int | None) -> tuple[int, int]:
    """Return how to make folds of stretches that all ranks have: by how many rank groups, and how many parts.

    Each part is one fold per rank group. There are as few of these as possible.

    Args:
        num_stretches: Number of stretches on each rank.
        num_ranks: Number of ranks.
        num_folds: Number of folds, lowered to a possible one. None: DEFAULT_NUM_FOLDS or more, below twice
            as many if the ranks can be divided like that, or the most possible.

    >>> [_rank_groups_and_parts(num_stretches=3, num_ranks=4, num_folds=number) for number in (2, 4, 6, 7, None)]
    [(1, 2), (2, 2), (2, 3), (2, 3), (4, 3)]
    >>> _rank_groups_and_parts(num_stretches=7, num_ranks=7, num_folds=None)
    (7, 2)
    """
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    if num_folds is None:
        enough = (number for number in divisors if number * num_stretches >= DEFAULT_NUM_FOLDS)
        num_rank_groups = next(enough, num_ranks)
        fewest = -(-DEFAULT_NUM_FOLDS // num_rank_groups)
        num_parts = num_stretches // max(1, num_stretches // fewest)  # as equal as possible
        return num_rank_groups, num_parts if num_rank_groups * num_parts < 2 * DEFAULT_NUM_FOLDS else fewest
    possible: dict[int, tuple[int, int]] = {}
    for num_rank_groups in divisors:
        for num_parts in range(1, num_stretches + 1):
            possible.setdefault(num_rank_groups * num_parts, (num_rank_groups, num_parts))
    return possible[max(number for number in possible if number <= num_folds)]


def plan_prompt_folds(num_prompts: int, num_ranks: int = 1, num_folds: int | None = None) -> list[FoldGroup]:
    """Plan folds of whole prompts, wherever these are in the step's microbatches.

    No backward of the loop is for one such fold, so further passes compute their gradients.

    Args:
        num_prompts: Prompts per rank; the smallest number over ranks.
        num_ranks: Number of ranks.
        num_folds: Number of folds over all ranks. An impossible number is lowered to a possible one. None: as in
            `plan_folds`.

    Returns:
        Fold groups without `rows_per_pass`. Ranks share each fold if they have enough prompts.

    >>> [(group.folds, group.fold_of_rank) for group in plan_prompt_folds(num_prompts=4, num_ranks=2, num_folds=3)]
    [(range(0, 1), (0, 0)), (range(1, 2), (0, 0)), (range(2, 3), (0, 0))]
    """
    num_rank_groups, num_parts = _rank_groups_and_parts(num_prompts, num_ranks, num_folds)
    return _fold_groups([()] * num_parts, num_ranks, num_rank_groups)


def least_recomputed(num_folds: int | None) -> int:
    """Return the fewest folds that are worth further passes: as many as are requested, or give an error bar.

    One fold predicts nothing.

    >>> [least_recomputed(number) for number in (1, 3, 8, None)]
    [2, 3, 4, 4]
    """
    return max(2, min(num_folds or MIN_FOLDS_STEP, MIN_FOLDS_STEP))


def folds_of_prompts(prompt_index: Tensor, fold_groups: Sequence[FoldGroup], rank: int = 0) -> Tensor:
    """Assign a rank's sequences to folds, (B,), so that no prompt is in two folds.

    Args:
        prompt_index: (B,), equal for responses to the same prompt.
        fold_groups: From `plan_prompt_folds`. Their numbers of this rank's prompts differ by at most one.
        rank: This rank's number.

    >>> folds_of_prompts(torch.tensor([4, 9, 6, 4]), plan_prompt_folds(3, num_folds=2))
    tensor([0, 1, 0, 0])
    """
    prompts, prompt_of_row = prompt_index.unique(return_inverse=True)
    folds = [group.folds[group.fold_of_rank[rank]] for group in fold_groups]
    return torch.tensor(folds, device=prompt_of_row.device)[prompt_of_row * len(fold_groups) // len(prompts)]
