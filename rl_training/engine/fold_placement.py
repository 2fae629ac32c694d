"""Which folds a step has, once its sequences are known, and which of them each sequence is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_training.gradients.folds import FoldGroup, folds_of_prompts, plan_prompt_folds
from rl_training.policy.rollout import Rollout
from rl_training.statistics.estimate import MIN_FOLDS_STEP
from rl_training.step.limits import Limits

if TYPE_CHECKING:
    from rl_training.engine.recorder import LoopSpec


def choose_folds(
    loop: LoopSpec,
    rollout: Rollout,
    planned: Sequence[FoldGroup],
    num_folds: int | None,
    limits: Limits,
    wants_gradients: bool,
) -> tuple[Sequence[FoldGroup], Tensor, bool]:
    """Return the folds of a step, that of each sequence (B,), and whether their gradients take passes of their own.

    A collective. Where microbatches mix prompts, or are too few for an error bar, folds of whole prompts take their
    place. Gradients of these can be made anew where the loss is made of scores alone and no prompt is incomplete.

    Args:
        rollout: All microbatches of the step.
        planned: The folds of the microbatches.
        num_folds: That a probe asks for.
        wants_gradients: A probe reads them.
    """
    is_mixed = bool(limits.mixed_prompts)
    folds, fold = place_in_folds(loop, rollout, planned, num_folds, is_mixed)
    is_wanted = wants_gradients and (is_mixed or num_folds is None)
    if not is_wanted or limits.split_prompts or limits.other_terms:
        return folds, fold, False
    if is_mixed:
        return folds, fold, folds[-1].folds.stop >= MIN_FOLDS_STEP
    if folds[-1].folds.stop < MIN_FOLDS_STEP:
        others, place = place_in_folds(loop, rollout, planned, num_folds, mixed=True)
        if others[-1].folds.stop >= MIN_FOLDS_STEP:
            return others, place, True
    return folds, fold, False


def place_in_folds(
    loop: LoopSpec, rollout: Rollout, planned: Sequence[FoldGroup], num_folds: int | None, mixed: bool
) -> tuple[Sequence[FoldGroup], Tensor]:
    """Return the folds that a step has, and which of them each sequence is in, (B,). A collective if mixed.

    Args:
        rollout: All microbatches of the step.
        planned: The folds of the microbatches.
        num_folds: That a probe asks for.
        mixed: The folds of microbatches do not hold whole prompts. Then those of other folds do.
    """
    rank, index = loop.ranks.number, rollout.prompt_index
    if mixed:
        num_prompts = torch.tensor(float(len(index.unique())), dtype=torch.float64, device=index.device)
        fewest = int(-loop.ranks.max(-num_prompts))
        folds: Sequence[FoldGroup] = plan_prompt_folds(fewest, loop.ranks.count, num_folds)
        return folds, folds_of_prompts(index, folds, rank)
    fold = torch.empty_like(index)
    for group in planned:
        for rows in group.passes:
            fold[rows.start : rows.stop] = group.folds[group.fold_of_rank[rank]]
    return planned, fold
