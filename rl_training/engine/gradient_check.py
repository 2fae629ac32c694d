"""Check whether the optimizer's gradient is the one that the folds' gradients and the loss weights imply.

Three comparisons, each between gradients of the same step:

- `gradient_mismatch`: the step's gradient and the mean of the microbatches' gradients caught by hooks.
- `weights_mismatch`: the step's gradient and the one recomputed from its loss weights.
- `TermsCheck`, now and then: one fold's gradient and the one recomputed from its loss weights. It detects loss terms
  that the loop does not report, and hooks that change gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.fold_recorder import FoldGradients
from rl_training.gradients.folds import FoldGroup
from rl_training.parallel.vectors import Vector, dot, rows_of
from rl_training.policy.padding_check import LIMIT as SAME_SCORES
from rl_training.policy.padding_check import LIMIT_ROUNDED as SAME_SCORES_ROUNDED
from rl_training.policy.policy import Policy
from rl_training.policy.precision import has_dropout
from rl_training.policy.scores import Scores
from rl_training.statistics.limit import Limit
from rl_training.step.batch import Batch
from rl_training.step.limits import GRADIENT_IN_PARTS, GRADIENT_MISMATCH, OTHER_GRADIENT
from rl_training.step.passes import Passes

EVERY = 16  # measured steps between comparisons, after those at steps 1, 2, 4, 8
TOLERANCE = 0.01  # relative to the norm of a fold's gradient: largest distance from the recomputed gradient
# The same if training's passes are rounded: of a sum that nearly cancels, rounding leaves percents.
TOLERANCE_ROUNDED = 0.5
SUM_TOLERANCE = 1e-3  # relative to the norm of the step's gradient: largest distance from the mean over microbatches
SUM_TOLERANCE_ROUNDED = 0.05  # the same if gradients are summed in half precision
ROUNDING = 1e-5  # relative to the sum of all folds' norms: the folds may nearly cancel

NO_SLICES = "so the gradient of a part of a microbatch is not known"
NO_SLICES_FIX = "use 8 or more microbatches of whole prompts"


def mismatch_of(fold_gradients: FoldGradients, batch: Batch, passes: Passes) -> Limit | None:
    """Return the limit if the step's gradient is not what its folds' gradients add up to, else None."""
    if batch.has_mixed_folds:
        return weights_mismatch(fold_gradients.sums, passes.policy)
    tensors = [*passes.reduction.shard.leaves.values(), *(fold_gradients.rows or ())]
    return gradient_mismatch(fold_gradients.sums, any(tensor.dtype.itemsize < 4 for tensor in tensors))


def gradient_mismatch(sums: Tensor, is_rounded: bool) -> Limit | None:
    """Return the limit if the step's gradient is not the mean of its microbatches' gradients, else None.

    Args:
        sums: As returned by FoldRecorder.finish, summed over all ranks.
        is_rounded: Gradients are summed in half precision.
    """
    late, distance, norm, *fold_norms = sums.sqrt().tolist()
    if late:
        return GRADIENT_IN_PARTS
    allowed = (SUM_TOLERANCE_ROUNDED if is_rounded else SUM_TOLERANCE) * norm + ROUNDING * sum(fold_norms)
    if not math.isfinite(distance) or distance <= allowed:
        return None
    return GRADIENT_MISMATCH.formatted(distance=distance / norm if norm else math.inf)


def weights_mismatch(sums: Tensor, policy: Policy) -> Limit | None:
    """Return the limit if the step's gradient is not the one recomputed from its loss weights, else None.

    Args:
        sums: As returned by FoldRecorder.finish, summed over all ranks.
        policy: The policy that ran the passes.
    """
    if has_dropout(policy.model):  # the recomputed passes draw other masks
        return None
    _, distance, norm, *fold_norms = sums.sqrt().tolist()
    allowed = (TOLERANCE_ROUNDED if policy.scorer.training_rounding else TOLERANCE) * norm + ROUNDING * sum(fold_norms)
    if not math.isfinite(distance) or distance <= allowed:
        return None
    return OTHER_GRADIENT.formatted(distance=distance / norm if norm else math.inf)


@dataclass(frozen=True)
class _Comparison:
    """A fold's gradient from the loop's backward and from its loss weights: norms over all ranks."""

    norm: float  # of the larger one
    distance: float  # norm of the difference
    # the scores equal training's up to rounding; otherwise the comparison says nothing about the loss
    is_same_policy: bool


class TermsCheck:
    """Compares one fold's gradient with the one its loss weights give, at measured steps 1, 2, 4, 8 and every EVERY-th.

    The folds take turns. Each comparison costs a forward pass and a backward over the fold, and nothing if its weights
    are all 0.
    """

    def __init__(self) -> None:
        self._count = 0
        self.limit: Limit | None = None  # result of the latest comparison
        self.allows_slices = True  # False once a loss term is known that hides the gradient of a part of a microbatch

    @property
    def is_due(self) -> bool:
        """Whether the current measured step is compared."""
        count = self._count + 1
        return count % EVERY == 0 or count & (count - 1) == 0

    def slicing_limit(self, has_slices: bool, other_terms: Limit | None) -> Limit | None:
        """Return the limit if folds are slices of microbatches and the loss has other terms, else None.

        A slice's share of another term is unknown.

        Args:
            has_slices: Folds are slices.
            other_terms: The limit from this step itself, apart from what earlier steps have shown.
        """
        if not has_slices:
            return None
        other_terms = other_terms or (None if self.is_due else self.limit)
        self.allows_slices &= not other_terms
        return other_terms and Limit(other_terms.code, f"{other_terms.message}, {NO_SLICES}", NO_SLICES_FIX)

    def compare(self, batch: Batch, passes: Passes, rows: Vector | None, squares: Tensor) -> Limit | None:
        """Return the limit if gradients of this or an earlier step reveal other loss terms, else None. Collective.

        Args:
            batch: The step's sequences and folds.
            passes: Recomputes a fold's gradient.
            rows: The folds' gradients, if they are kept.
            squares: (F,), their square norms over all ranks.
        """
        is_due, self._count = self.is_due, self._count + 1
        if is_due and not has_dropout(passes.policy.model):
            # Only last slices are compared: the earlier slices of a microbatch come from the probes' own passes.
            microbatch_ends = {microbatch.stop for microbatch in batch.microbatch_rows}
            groups = [group for group in batch.folds if group.rows_per_pass[-1].stop in microbatch_ends]
            comparison = _compare_group(batch, passes, rows, groups[self._count % len(groups)], squares)
            tolerance = TOLERANCE_ROUNDED if passes.policy.scorer.training_rounding else TOLERANCE
            allowed = tolerance * comparison.norm + ROUNDING * float(squares.sqrt().sum())
            if comparison.is_same_policy:
                distance = comparison.distance
                self.limit = (
                    None if distance <= allowed else OTHER_GRADIENT.formatted(distance=distance / comparison.norm)
                )
        return self.limit


def _compare_group(batch: Batch, passes: Passes, rows: Vector | None, group: FoldGroup, squares: Tensor) -> _Comparison:
    """Recompute the gradient of these folds and compare it with the caught one. Collective.

    If rows are not kept, only the norms are compared.
    """
    score_distance, num_tokens = torch.zeros_like(squares[0]), torch.zeros_like(squares[0])

    def compare_scores(rows_of_pass: Tensor, fresh: Scores) -> None:
        is_token = fresh.mask.bool()
        difference = fresh.logps.detach() - batch.scores.logps[rows_of_pass, : is_token.shape[1]]
        score_distance.add_(difference[is_token].double().abs().sum())
        num_tokens.add_(is_token.sum())

    rows_of_group = slice(group.rows_per_pass[0].start, group.rows_per_pass[-1].stop)
    num_weights = batch.loss_weights.stacked()[:, rows_of_group].count_nonzero()
    has_weight = float(passes.ranks.reduce(num_weights.double()))
    indices = torch.arange(len(batch.fold), device=batch.fold.device)
    parts = [indices[part.start : part.stop] for part in group.rows_per_pass] if has_weight else []
    shares = passes.shares_of_folds(batch)
    (recomputed,) = passes.sum(
        batch.rollout, len(group.folds), parts, len(parts), [batch.loss_weights], shares, compare_scores
    )
    recomputed_squares = dot(recomputed, recomputed)
    sq_distances = torch.zeros_like(recomputed_squares)
    if rows is not None:
        differences = [part.to(x) - x for part, x in zip(rows_of(rows, group.folds), recomputed, strict=True)]
        sq_distances = dot(differences, differences)
    of_scores = torch.stack([score_distance, num_tokens]).to(recomputed_squares)
    sums = passes.ranks.reduce(torch.cat([recomputed_squares, sq_distances, of_scores]))
    recomputed_squares, sq_distances, (score_distance, num_tokens) = sums.split([len(group.folds)] * 2 + [2])
    caught_squares = squares[group.folds.start : group.folds.stop].to(recomputed_squares)
    if rows is None:
        sq_distances = (caught_squares.sqrt() - recomputed_squares.sqrt()).square()
    tolerance = SAME_SCORES_ROUNDED if passes.policy.scorer.training_rounding else SAME_SCORES
    is_same = not float(num_tokens) or float(score_distance / num_tokens) <= tolerance
    norm = math.sqrt(max(float(caught_squares.sum()), float(recomputed_squares.sum())))
    return _Comparison(norm, math.sqrt(max(float(sq_distances.sum()), 0.0)), is_same)
