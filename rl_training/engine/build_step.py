"""Build a step's data, once all gradients are complete: its sequences, folds, gradients and reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.engine.copied_groups import Copies, find_copies
from rl_training.engine.fold_placement import choose_folds
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.gradient_check import mismatch_of
from rl_training.engine.loop import Loop
from rl_training.engine.recorder import JoinedMicrobatches, StepRecorder
from rl_training.engine.requirements import needs_of
from rl_training.engine.step_checks import StepChecks
from rl_training.optim.state import gradients_and_states, view_optimizer
from rl_training.parallel.ranks import Ranks
from rl_training.step.batch import Batch
from rl_training.step.data import Gradients, StepData
from rl_training.step.folds import FoldGroup
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.reasons import Reasons


def build_step(
    step_recorder: StepRecorder,
    joined: JoinedMicrobatches,
    reasons: Reasons,
    loop: Loop,
    passes: Passes,
    fold_recorder: FoldRecorder | None,
    checks: StepChecks,
) -> StepData:
    """Return the data of a step whose gradients are complete. Collective.

    `gradients.rows_reason` says why if gradients cannot be split into folds: microbatches mix prompts, the loss
    has terms whose share in a part of a microbatch is unknown, or the step's gradient differs from that of its
    microbatches.

    Args:
        step_recorder: The recorded step and its plan.
        joined: Its microbatches, concatenated.
        reasons: What its sequences and the loop already rule out.
        passes: Runs further passes.
        fold_recorder: Holds the fold gradients caught by hooks. None if no probe asks for any.
        checks: What earlier steps have shown about the loss and the rewards.
    """
    needs = needs_of(step_recorder.probes)
    ranks = passes.ranks
    other_terms = reasons.other_terms
    copies = Copies() if reasons.split_prompts else find_copies(joined.rollout, joined.scores, ranks)
    if copies.reason:
        shared = copies.reason if copies.on_several_ranks else None
        reasons = dataclasses.replace(
            reasons, mixed_prompts=copies.reason, copied_groups=copies.reason, copied_on_ranks=shared
        )
    wants_gradients = Need.FOLD_GRADIENTS in needs
    folds, fold, is_recomputed = choose_folds(
        ranks, joined.rollout, step_recorder.folds, step_recorder.num_folds, reasons, wants_gradients, copies
    )
    batch = _make_batch(step_recorder, joined, folds, fold, copies, ranks)
    mean, optimizer = gradients_and_states(loop.shard, view_optimizer(loop.shard))
    fold_gradients = rows_reason = None
    if not is_recomputed:
        rows_reason = reasons.mixed_prompts or checks.terms.slicing_reason(step_recorder.has_slices, other_terms)
    if fold_recorder is not None and needs & (Need.FOLD_GRADIENTS | Need.SQ_NORMS) and not rows_reason:
        fold_gradients = fold_recorder.complete(batch, passes, mean, optimizer)
        rows_reason = mismatch_of(fold_gradients, batch, passes)
        is_compared = step_recorder.has_slices or Need.LOSS_CHECK in needs
        if is_compared and not (rows_reason or other_terms or is_recomputed):
            other_terms = checks.terms.compare(batch, passes, fold_gradients.rows, fold_gradients.squares)
            rows_reason = checks.terms.slicing_reason(step_recorder.has_slices, other_terms)
    return StepData(
        number=step_recorder.number,
        batch=batch,
        gradients=Gradients(
            weights=loop.shard.weights(),
            mean=mean,
            layout=loop.shard.layout,
            rows=None if fold_gradients is None else fold_gradients.rows,
            rows_reason=rows_reason,
            sq_norms=None if fold_gradients is None else fold_gradients.sq_norms,
        ),
        optimizer=optimizer,
        reasons=dataclasses.replace(
            reasons,
            one_fold=loop.one_fold_reason(step_recorder.probes) if batch.num_folds < 2 else None,
            other_terms=other_terms,
            relative_rewards=checks.relative_rewards(joined.rollout, reasons, ranks),
        ),
    )


def _make_batch(
    step_recorder: StepRecorder,
    joined: JoinedMicrobatches,
    folds: Sequence[FoldGroup],
    fold: Tensor,
    copies: Copies,
    ranks: Ranks,
) -> Batch:
    """Return the step's sequences, with fold sizes summed over all ranks. Collective."""
    ones = torch.ones(len(fold), dtype=torch.float64, device=fold.device)
    return Batch(
        rollout=joined.rollout,
        scores=joined.scores,
        loss_weights=joined.loss_weights,
        microbatch_rows=step_recorder.microbatch_rows,
        folds=folds,
        fold=fold,
        fold_sizes=ranks.reduce(ones.new_zeros(folds[-1].folds.stop).index_add_(0, fold, ones)).cpu(),
        responses_per_prompt=step_recorder.responses_per_prompt,
        loss_settings=step_recorder.loss_settings,
        unit=copies.unit,
        response=copies.response,
    )
