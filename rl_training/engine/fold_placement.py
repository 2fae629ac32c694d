"""Choose the folds of a step and assign each sequence to one, once its sequences are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import Rollout
from rl_training.statistics.jackknife import MIN_FOLDS_STEP
from rl_training.step.batch import NO_COPIES, Copies
from rl_training.step.folds import FoldGroup, folds_of_prompts, least_recomputed, plan_prompt_folds


def choose_folds(
    ranks: Ranks,
    rollout: Rollout,
    planned: Sequence[FoldGroup],
    num_folds: int | None,
    copies: Copies = NO_COPIES,
    *,
    plan_fails: bool,
    can_recompute: bool,
) -> tuple[Sequence[FoldGroup], Tensor, bool]:
    """Return the step's folds, the fold of each sequence (B,), and whether their gradients are recomputed. Collective.

    If microbatches do not hold whole folds, or are too few for the requested folds or an error bar, folds of whole
    prompts, each with all its copies, replace the planned ones.

    Args:
        rollout: All microbatches of the step.
        planned: The folds planned for the microbatches.
        num_folds: The number requested by a probe, if any.
        copies: Which groups are copies.
        plan_fails: The microbatches do not hold whole folds.
        can_recompute: Further passes are allowed, and give the gradients of any sequences: the loss depends on scores
            only, and no prompt is incomplete.
    """
    index = rollout.prompt_index
    if copies.unit is not None:
        index, num_folds = copies.unit, 1 if copies.on_several_ranks else num_folds  # one fold: there is no other
    if plan_fails or (can_recompute and planned[-1].folds.stop < (num_folds or MIN_FOLDS_STEP)):
        num_prompts = torch.tensor(float(len(index.unique())), dtype=torch.float64, device=index.device)
        min_prompts = int(-ranks.max(-num_prompts))
        folds = plan_prompt_folds(min_prompts, ranks.count, num_folds)
        count = folds[-1].folds.stop
        has_more = plan_fails or count > planned[-1].folds.stop
        is_recomputed = can_recompute and has_more and count >= least_recomputed(num_folds)
        if plan_fails or is_recomputed:
            return folds, folds_of_prompts(index, folds, ranks.number), is_recomputed
    fold = torch.empty_like(index)
    for group in planned:
        for rows in group.rows_per_pass:
            fold[rows.start : rows.stop] = group.folds[group.fold_of_rank[ranks.number]]
    return planned, fold, False
