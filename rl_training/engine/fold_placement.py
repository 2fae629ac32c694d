"""Choose the folds of a step: those planned for its microbatches, or folds of prompts wherever these lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl_training.parallel.ranks import Ranks
from rl_training.statistics.jackknife import MIN_FOLDS_STEP
from rl_training.step.folds import FoldGroup, FoldSource, folds_of_prompts, least_recomputed, plan_prompt_folds
from rl_training.step.needs import Need
from rl_training.step.reasons import Reasons


def num_folds_in(fold_groups: Sequence[FoldGroup]) -> int:
    """Return the number of folds over all ranks of a plan. 0 without a plan."""
    return fold_groups[-1].folds.stop if fold_groups else 0


def may_recompute(needs: Need, reasons: Reasons) -> bool:
    """Return whether further passes may give gradients by fold: probes need them, and passes give those of the loss.

    Passes give the gradient of any sequences if the loss depends on scores only, and no prompt is incomplete. The noise
    scale alone is not worth them.
    """
    return Need.FOLD_GRADIENTS in needs and not (reasons.split_prompts or reasons.other_terms)


def choose_folds(
    planned: Sequence[FoldGroup],
    count_prompts: Callable[[], int],
    num_ranks: int,
    num_folds: int | None,
    *,
    plan_fails: bool,
    can_recompute: bool,
) -> tuple[Sequence[FoldGroup], FoldSource]:
    """Return the folds of a step, and what gives their gradients.

    Folds of whole prompts replace the planned ones if microbatches do not hold whole folds, or if there are too few for
    the request or for an error bar and further passes give more. Only then are prompts counted, for which ranks wait.

    Args:
        planned: The folds planned for the step's microbatches.
        count_prompts: Returns the prompts of the rank with the fewest, at least 1. Called on all ranks or on none.
        num_ranks: Number of ranks.
        num_folds: The number that a probe asks for. None for the default.
        plan_fails: Microbatches do not hold whole folds.
        can_recompute: See `may_recompute`.
    """
    planned_count = num_folds_in(planned)
    has_too_few = planned_count < (num_folds or MIN_FOLDS_STEP)
    if not (plan_fails or (can_recompute and has_too_few)):
        return planned, FoldSource.CAUGHT
    of_prompts = plan_prompt_folds(count_prompts(), num_ranks, num_folds)
    count = num_folds_in(of_prompts)
    is_gain = plan_fails or count > planned_count
    if can_recompute and is_gain and count >= least_recomputed(num_folds):
        return of_prompts, FoldSource.RECOMPUTED
    return (of_prompts, FoldSource.MISSING) if plan_fails else (planned, FoldSource.CAUGHT)


def fewest_prompts(index: Tensor, ranks: Ranks) -> int:
    """Return the number of prompts of the rank with the fewest. Collective.

    Args:
        index: (B,), equal for this rank's responses to the same prompt.
    """
    return ranks.least(len(index.unique()), index.device)


def fold_sizes(fold: Tensor, num_folds: int, ranks: Ranks) -> Tensor:
    """Return the number of sequences in each fold over all ranks, (K,), in CPU memory. Collective.

    Args:
        fold: (B,), the fold of each of this rank's sequences.
    """
    ones = torch.ones(len(fold), dtype=torch.float64, device=fold.device)
    return ranks.reduce(ones.new_zeros(num_folds).index_add_(0, fold, ones)).cpu()


def fold_of_rows(fold_groups: Sequence[FoldGroup], source: FoldSource, index: Tensor, rank: int) -> Tensor:
    """Return the fold of each of a rank's sequences, (B,).

    Args:
        fold_groups, source: From `choose_folds`.
        index: (B,), equal for responses to the same prompt.
        rank: This rank's number.
    """
    if source is not FoldSource.CAUGHT:
        return folds_of_prompts(index, fold_groups, rank)
    fold = torch.empty_like(index)
    for fold_group in fold_groups:
        for rows in fold_group.rows_per_pass:
            fold[rows.start : rows.stop] = fold_group.folds[fold_group.fold_of_rank[rank]]
    return fold
