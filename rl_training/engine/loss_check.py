"""Whether a step's gradient is that of its loss weights alone, or of further terms of the loss too.

    gradient of the step = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik + that of other terms

Other terms are whatever reaches the model by another way than the scores: an auxiliary loss of a mixture of experts, a
supervised loss on other sequences, a penalty on weights. No setting lists them all. Two checks see them:

- Where the loss is at hand, its graph says it at every microbatch, without any computation (`MadeLoss`).
- Now and then the gradient of one fold is made anew from its weights and compared (`TermsCheck`). This also sees a loss
  that the loop does not hand over, and hooks that change gradients on their way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.gradients.folds import FoldGroup
from rl_training.parallel.vectors import Vector, dot
from rl_training.policy.padding_check import LIMIT as SAME_SCORES
from rl_training.policy.padding_check import LIMIT_ROUNDED as SAME_SCORES_ROUNDED
from rl_training.policy.precision import has_dropout
from rl_training.policy.scores import Scores
from rl_training.statistics.limit import Limit
from rl_training.step.batch import Batch, LossSettings
from rl_training.step.limits import OTHER_GRADIENT
from rl_training.step.runtime import Runtime, shares_of_folds

EVERY = 16  # measured steps from one comparison to the next, after those at steps 1, 2, 4, 8
LIMIT = 0.01  # of the norm of a fold's gradient: how far it may be from the one that its weights give
LIMIT_ROUNDED = (
    0.5  # the same where training's passes are rounded: of a sum that nearly cancels, rounding leaves percents
)
ROUNDING = 1e-5  # of the sum of all folds' norms

NO_PARTS = "so the gradient of a part of a microbatch is not known"
NO_PARTS_FIX = "use 8 or more microbatches of whole prompts"


@dataclass(frozen=True)
class MadeLoss:
    """What a loop says of the loss that it makes of a microbatch's scores."""

    value: Tensor | None = None  # the loss itself; None where the loop makes it later
    settings: LossSettings | None = None  # as they are now; None: as they were when training began
    other_terms: bool = False  # the loop knows of terms beside the scores

    def has_other_terms(self, scores: Scores, leaves: Iterable[Tensor]) -> bool:
        """Return whether it is known to reach one of these parameters by another way than through the scores."""
        return self.other_terms or (self.value is not None and has_other_terms(self.value, scores, leaves))


def has_other_terms(loss: Tensor, scores: Scores, leaves: Iterable[Tensor]) -> bool:
    """Return whether the loss reaches a leaf by another way than through these scores.

    A walk over the graph between the loss and the scores, some hundred nodes; a way around them leads to a leaf.

    >>> w = torch.ones(1, 1, requires_grad=True)
    >>> scores = Scores(2 * w, 3 * w, torch.ones(1, 1))
    >>> loss = (scores.logps * scores.entropies).sum()
    >>> has_other_terms(loss, scores, [w]), has_other_terms(loss + (w - 1).square().sum(), scores, [w])
    (False, True)
    """
    ends = {(part.grad_fn, part.output_nr) for part in (scores.logps, scores.entropies) if part.grad_fn is not None}
    numbers = {id(leaf) for leaf in leaves}
    waiting, seen = [(loss.grad_fn, loss.output_nr)], set()
    while waiting:
        node, output = waiting.pop()
        if node is None or (node, output) in ends or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in numbers:
            return True
        waiting.extend(node.next_functions)
    return False


@dataclass(frozen=True)
class _Comparison:
    """A fold's gradient as the loop's backward left it, and as its weights give it: square norms over all processes."""

    off: float  # of the difference
    caught: float
    expected: float
    is_same_policy: bool  # the scores are training's own, up to rounding: else nothing is said of the loss


class TermsCheck:
    """Compares one fold's gradient with its weights', at measured steps 1, 2, 4, 8, 16 and every EVERY-th from there.

    The folds take turns. It costs a forward pass and a backward over the fold, and none where its weights are all 0.
    """

    def __init__(self) -> None:
        self._count = 0
        self.limit: Limit | None = None  # what the latest comparison has said
        self.allows_parts = True  # no term is known that would hide the gradient of a part of a microbatch

    @property
    def is_due(self) -> bool:
        """Whether the step that is measured now is compared."""
        count = self._count + 1
        return count % EVERY == 0 or count & (count - 1) == 0

    def slicing_limit(self, batch: Batch, other_terms: Limit | None) -> Limit | None:
        """Return the limit of folds that are slices of microbatches, where the loss has other terms, or None.

        The share of a slice in another term is not known.

        Args:
            batch: The step's.
            other_terms: What is known of the loss beside what earlier steps have shown.
        """
        if not batch.has_slices:
            return None
        other_terms = other_terms or (None if self.is_due else self.limit)
        self.allows_parts &= not other_terms
        return other_terms and Limit(other_terms.code, f"{other_terms.message}, {NO_PARTS}", NO_PARTS_FIX)

    def look(self, batch: Batch, runtime: Runtime, rows: Vector | None, squares: Tensor) -> Limit | None:
        """Return the limit of a loss with other terms, by this step's gradients or an earlier step's, or None.

        A collective.

        Args:
            batch: The step's.
            runtime: What makes a fold's gradient anew.
            rows: The gradients of the folds, where they are kept.
            squares: (F,), their square norms over all processes.
        """
        is_due, self._count = self.is_due, self._count + 1
        if is_due and not has_dropout(runtime.policy.model):
            ends = {part.stop for part in batch.microbatch_rows}  # what comes before in a slice is our own
            groups = [group for group in batch.folds if group.passes[-1].stop in ends]
            comparison = _compare(batch, runtime, rows, groups[self._count % len(groups)], squares)
            if comparison.is_same_policy:
                self.limit = _weights_limit(comparison, squares, bool(runtime.policy.scorer.training_rounding))
        return self.limit


def _weights_limit(comparison: _Comparison, squares: Tensor, is_rounded: bool) -> Limit | None:
    """Return the limit of a fold whose gradient is not that of its weights, or None.

    Args:
        comparison: Of one fold.
        squares: (F,), of all folds.
        is_rounded: Training's passes are rounded.
    """
    norm, off = math.sqrt(max(comparison.caught, comparison.expected)), math.sqrt(max(comparison.off, 0.0))
    allowed = (LIMIT_ROUNDED if is_rounded else LIMIT) * norm + ROUNDING * float(squares.sqrt().sum())
    return None if off <= allowed else OTHER_GRADIENT.filled(distance=off / norm)


def _compare(batch: Batch, runtime: Runtime, rows: Vector | None, group: FoldGroup, squares: Tensor) -> _Comparison:
    """Return the gradient of these folds, made anew, beside the one that was caught, of which norms alone may be kept.

    A collective.
    """
    ranks = runtime.ranks
    made = runtime.layout.zeros(len(group.folds))
    shares = shares_of_folds(batch, ranks.count)
    distance, count = torch.zeros_like(squares[0]), torch.zeros_like(squares[0])
    weighed = batch.loss_weights.stacked()[:, group.passes[0].start : group.passes[-1].stop].count_nonzero()
    if float(ranks.reduce(weighed.double())):
        for part in group.passes:
            numbers = torch.arange(part.start, part.stop, device=batch.fold.device)
            fresh = runtime.policy.score(batch.rollout, numbers)
            width, there = fresh.logps.shape[1], fresh.mask.bool()
            distance += (fresh.logps.detach() - batch.scores.logps[numbers, :width])[there].double().abs().sum()
            count += there.sum()
            row_weights = batch.loss_weights.of_rows(numbers, width, shares[numbers].to(fresh.logps.dtype))
            runtime.reduction.add(made, fresh, row_weights)
    expected = dot(made, made)
    if rows is None:
        off = torch.zeros_like(expected)
    else:
        own_rows = [part[group.folds.start : group.folds.stop].to(x) for part, x in zip(rows, made, strict=True)]
        rest = [part - x for part, x in zip(own_rows, made, strict=True)]
        off = dot(rest, rest)
    sums = ranks.reduce(torch.cat([expected, off, torch.stack([distance, count]).to(expected)]))
    expected, off, (distance, count) = sums[: len(expected)], sums[len(expected) : -2], sums[-2:]
    caught = squares[group.folds.start : group.folds.stop].to(expected)
    if rows is None:
        off = (caught.sqrt() - expected.sqrt()).square()
    limit = SAME_SCORES_ROUNDED if runtime.policy.scorer.training_rounding else SAME_SCORES
    is_same = not float(count) or float(distance / count) <= limit
    return _Comparison(float(off.sum()), float(caught.sum()), float(expected.sum()), is_same)
