"""An optimizer step as data: tensors, numbers and reasons.

For the letters in shapes see policy/rollout.py. step/passes.py computes with this data on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rl_training.optim.state import OptimizerView
from rl_training.parallel.fold_vectors import FoldVectors
from rl_training.parallel.vectors import Layout
from rl_training.step.batch import Batch
from rl_training.step.reasons import Fixes, Reasons


@dataclass(frozen=True)
class Gradients:
    """The step's training gradient before clipping: this rank's entries of each parameter, (n,), by name."""

    mean: Mapping[str, Tensor]  # over microbatches and ranks, as the optimizer gets it
    layout: Layout
    # The next two are None if `reasons.no_folds` is set, or if no probe needs them.
    by_fold: FoldVectors | None = None  # the mean gradient of each fold: by_fold.means(), (K, n) per bucket
    # (K + 1, parameters, 2) fp64: |g_k|² and Σ P g_k² of each fold, the mean gradient last; over all ranks
    sq_norms: Tensor | None = None


@dataclass(frozen=True)
class StepData:
    """One optimizer step on this rank: gradients are complete, the parameters are still old."""

    number: int  # counted from 1: the `step` in this optimizer step's log line
    batch: Batch
    weights: Mapping[str, Tensor]  # this rank's entries of each parameter, (n,), by name
    gradients: Gradients
    optimizer: OptimizerView
    reasons: Reasons
    fixes: Fixes  # with which a reason that is only decided later ends
