"""Gradients of folds whose prompts lie in several microbatches, made anew by passes over whole prompts.

Where no microbatch ends with a prompt, or too few do, hooks cannot tell the gradients of the folds apart. The loss's
weights on log-probabilities and entropies say what each response adds, so a further forward pass and backward gives

    g_k = 1/n_k Σ_{i in fold k} Σ_t c_it ∂log π(t_it) + d_it ∂h_it

It costs as much as training's own passes over the responses that have a weight: with an advantage of 0 none has.
"""

from __future__ import annotations

import math

from torch import Tensor

from rl_training.engine.loss_check import LIMIT, LIMIT_ROUNDED, ROUNDING
from rl_training.parallel.vectors import Vector, copy
from rl_training.policy.policy import Policy
from rl_training.policy.precision import has_dropout
from rl_training.statistics.limit import Limit
from rl_training.step.batch import Batch
from rl_training.step.limits import OTHER_GRADIENT
from rl_training.step.runtime import Runtime, add_gradients, passes_in_lockstep


def fill_rows_by_prompt(batch: Batch, runtime: Runtime, rows: Vector) -> None:
    """Fill the rows of all folds, (F, n) of each bucket, on the scale of what the leaves see. A collective."""
    has_weight = batch.loss_weights.stacked().flatten(2).any(dim=2).any(dim=0)
    shares = has_weight.new_ones(len(has_weight), 1, dtype=batch.loss_weights.logps.dtype)
    for group, passes in passes_in_lockstep(batch, runtime.ranks, has_weight):
        total = runtime.layout.zeros(len(group.folds))
        for numbers in passes:
            add_gradients(batch.rollout, runtime, [total], numbers, [batch.loss_weights], shares)
        copy([part[group.folds.start : group.folds.stop] for part in rows], total)


def weights_mismatch(policy: Policy, sums: Tensor) -> Limit | None:
    """Return the limit of a step whose gradient is not the one that its loss's weights give, or None.

    Args:
        policy: That has made the passes.
        sums: Over all processes, as `FoldRecorder.finish` returns them.
    """
    if has_dropout(policy.model):  # the passes draw other masks
        return None
    _, off, norm, *norms = sums.sqrt().tolist()
    tolerance = LIMIT_ROUNDED if policy.scorer.training_rounding else LIMIT
    if not math.isfinite(off) or off <= tolerance * norm + ROUNDING * sum(norms):
        return None
    return OTHER_GRADIENT.filled(distance=off / norm if norm else math.inf)
