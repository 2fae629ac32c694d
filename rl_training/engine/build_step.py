"""A step's data, made in one place once all gradients are in: its sequences and folds, their gradients, its limits."""

from __future__ import annotations

import dataclasses

from rl_training.engine.fold_placement import choose_folds
from rl_training.engine.fold_recorder import GradientRows
from rl_training.engine.loss_check import TermsCheck
from rl_training.engine.recorder import LoopSpec, StepRecorder
from rl_training.engine.requirements import needs_of
from rl_training.optim.state import gradients_and_states, view_optimizer
from rl_training.policy.rollout import Rollout
from rl_training.step.data import Gradients, StepData
from rl_training.step.limits import Limits
from rl_training.step.needs import Need
from rl_training.step.runtime import Runtime


def build_step(
    step: StepRecorder,
    loop: LoopSpec,
    runtime: Runtime,
    rollout: Rollout,
    limits: Limits,
    rows: GradientRows | None,
    terms: TermsCheck,
) -> StepData:
    """Return the data of a step whose gradients are all in. A collective.

    Where gradients of folds cannot be told apart, `rows_limit` says why: microbatches mix prompts, the loss has terms
    whose share in a part of a microbatch is not known, or the step's gradient is not what its microbatches gave.

    Args:
        step: The microbatches.
        loop: The training loop.
        runtime: What calculates.
        rollout: All microbatches as one.
        limits: Of the step, as far as its sequences and the loop tell.
        rows: What hooks have caught of the folds' gradients; None where no probe asks for any.
        terms: What is known of the loss from earlier steps.
    """
    needs = needs_of(step.probes)
    folds, fold, is_made_anew = choose_folds(
        loop, rollout, step.folds, step.num_folds, limits, Need.FOLD_GRADIENTS in needs
    )
    batch = step.join(rollout, folds, fold, loop.ranks)
    mean, optimizer = gradients_and_states(loop.shard, view_optimizer(loop.shard))
    caught, rows_limit, other_terms = None, None, limits.other_terms
    if not is_made_anew:
        rows_limit = limits.mixed_prompts or terms.slicing_limit(batch, other_terms)
    if rows is not None and needs & (Need.FOLD_GRADIENTS | Need.SQ_NORMS) and not rows_limit:
        caught = rows.complete(batch, runtime, mean, optimizer)
        rows_limit = caught.mismatch
        is_compared = batch.has_slices or Need.LOSS_CHECK in needs
        if is_compared and not (rows_limit or other_terms or is_made_anew):
            other_terms = terms.look(batch, runtime, caught.rows, caught.squares)
            rows_limit = other_terms and terms.slicing_limit(batch, other_terms)
    one_fold = loop.one_fold_limit(step.probes) if batch.num_folds < 2 else None
    return StepData(
        number=step.number,
        batch=batch,
        gradients=Gradients(
            weights=loop.shard.weights(),
            mean=mean,
            layout=loop.shard.layout,
            rows=None if caught is None else caught.rows,
            rows_limit=rows_limit,
            sq_norms=None if caught is None else caught.sq_norms,
        ),
        optimizer=optimizer,
        limits=dataclasses.replace(limits, one_fold=one_fold, other_terms=other_terms),
    )
