"""Detect, from gradients, loss terms that the loop does not report, and hooks that change gradients.

    gradient of the step = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik + gradient of other terms

Further passes recompute a gradient from the loss weights c and d, and it is compared with the one that training made.
loss_info.py finds such terms in the loss's graph, if the loss is at hand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.engine.gradient_check import ROUNDING, CaughtSums
from rl_training.parallel.fold_vectors import FoldVectors
from rl_training.parallel.vectors import Vector, dot
from rl_training.policy.dropout import has_dropout
from rl_training.policy.policy import Policy
from rl_training.policy.precision import SAME_SCORES, SAME_SCORES_ROUNDED
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.scores import Scores
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.data import Gradients
from rl_training.step.folds import FoldGroup, FoldSource
from rl_training.step.passes import Passes, Weightings

EVERY = 16  # measured steps between comparisons, after those at steps 1, 2, 4, 8
TOLERANCE = 0.01  # relative to the norm of the gradient: largest distance from the recomputed one
# The same if training's passes are rounded: of a sum that nearly cancels, rounding leaves percents.
TOLERANCE_ROUNDED = 0.5
NOISE_FACTOR = 2.0  # allowed in addition: this many times the distance that other dropout masks make
SEED = 25  # for the masks of the second recomputed gradient; any seed but training's
OTHER_GRADIENT = Unavailable(
    "other_gradient",
    "the gradient of a fold differs by {distance:.2g} of its norm from the one that its log-probabilities and "
    "entropies give: the loss has another term (declare it with other_terms=True), or something changes gradients "
    "during the backward or between microbatches",
)


class TermsCheck:
    """Compares gradients with those that the loss weights give, and decides whether a step's loss has another term.

    Where hooks have caught the gradients by fold, one fold's is compared at steps 1, 2, 4, 8 and every EVERY-th. The
    folds take turns, those of one pass together. Each comparison costs a forward pass and a backward over them, and
    nothing if their weights are all 0. Where folds are recomputed from the loss weights, all of them together are
    compared with the step's gradient, at each step.

    With dropout a comparison costs twice as much: two recomputed gradients show how far dropout alone moves one, and
    another term is found only beyond that. It then takes place at steps 1, 2, 4, 8, … in either case.

    The calls of a step, in their order:

        begin_step        its gradients can be compared
        is_known          an earlier step has shown another term, so that folds need not be recomputed
        check             its gradients by fold are complete
        reason_of_step    the decision, which the step's reasons keep

    Args:
        count: The number of steps so far whose gradients could be compared.
        distance: Of the latest comparison, if it has found another term: relative to the norm. 0 if it has not.
    """

    def __init__(self, count: int = 0, distance: float = 0.0) -> None:
        self.count = count
        self.distance = distance

    def begin_step(self) -> None:
        """Count a step whose gradients can be compared."""
        self.count += 1

    @property
    def is_due(self) -> bool:
        """Whether the latest of these steps compares gradients even if that takes further passes."""
        return self.count % EVERY == 0 or self.count & (self.count - 1) == 0

    @property
    def turn(self) -> int:
        """The number of comparisons that were due so far, counted from 1."""
        return self.count.bit_length() if self.count < EVERY else EVERY.bit_length() - 1 + self.count // EVERY

    @property
    def reason(self) -> Unavailable | None:
        """The result of the latest comparison."""
        return OTHER_GRADIENT.formatted(distance=self.distance) if self.distance else None

    def is_known(self, policy: Policy) -> bool:
        """Return whether an earlier step has shown another term, and this step need not look for it again.

        It may go, so it is looked for when a comparison is due. With dropout it may just be hidden then, so it is not.

        Args:
            policy: What is trained.
        """
        return self.reason is not None and (not self.is_due or has_dropout(policy.model))

    def check(self, batch: Batch, gradients: Gradients, sums: CaughtSums, passes: Passes) -> Unavailable | None:
        """Compare the gradients of a step, if its turn has come. Collective.

        Args:
            batch: The step's sequences and folds.
            gradients: The step's, with those of its folds, or the folds' square norms.
            sums: What the gradients by fold add up to.
            passes: Recomputes gradients.

        Returns:
            The reason why the loss has another term, by this or an earlier comparison, or None.
        """
        if batch.fold_source is FoldSource.RECOMPUTED:
            self._check_recomputed(batch, gradients, sums, passes)
        elif self.is_due:
            self._check_caught(batch, gradients, sums, passes)
        return self.reason

    def reason_of_step(self, told: Unavailable | None, *, is_asked: bool) -> Unavailable | None:
        """Return the reason why a step's loss has a term besides its scores, or None. This alone decides it.

        Args:
            told: What the loop says of the loss, or the loss's graph shows, on any rank (loss_info.py).
            is_asked: Gradients are asked too, those of earlier steps if this one's could not be compared: a probe needs
                it, or the step's folds were recomputed from the loss weights.
        """
        return told or (self.reason if is_asked else None)

    def _check_caught(self, batch: Batch, gradients: Gradients, sums: CaughtSums, passes: Passes) -> None:
        """Compare the gradient of the folds whose turn it is, as hooks have caught it. Collective."""
        sq_norms = gradients.sq_norms
        if sq_norms is None:
            squares = torch.tensor(sums.fold_sq_norms, dtype=torch.float64, device=batch.fold.device)
        else:
            squares = sq_norms[:-1, :, 0].sum(dim=1)
        fold_group = batch.fold_groups[self.turn % len(batch.fold_groups)]
        comparison = _compare_folds(batch, passes, gradients.by_fold, fold_group, squares)
        if comparison is None:
            return
        norm, distance, noise = comparison
        tolerance = _tolerance(passes.policy)
        tolerance += 0.0 if gradients.by_fold is None else gradients.by_fold.rounding
        allowed = tolerance * norm + ROUNDING * float(squares.sqrt().sum()) + NOISE_FACTOR * noise
        if distance > allowed:
            self.distance = distance / norm
        elif not noise:
            self.distance = 0.0  # with dropout, a term that was found may just be hidden this time

    def _check_recomputed(self, batch: Batch, gradients: Gradients, sums: CaughtSums, passes: Passes) -> None:
        """Compare the step's gradient with that of its recomputed folds. Collective.

        Under dropout, when a comparison is due, the step's gradient is recomputed twice more, with other masks.
        """
        tolerance = _tolerance(passes.policy)
        if not has_dropout(passes.policy.model):
            self.distance = sums.distance_beyond(tolerance) or 0.0
        elif self.is_due:
            layout = passes.layout
            mean = [part.unsqueeze(0) for part in layout.vector(gradients.mean.values())]
            first = _mean_by_weights(batch, passes)
            with preserve_rng(layout.device):
                seed_torch(SEED, device=layout.device)
                second = _mean_by_weights(batch, passes)
            squares = torch.cat([dot(mean, mean), _sq_distance(mean, first), _sq_distance(second, first)])
            norm, distance, noise = passes.ranks.reduce(squares).sqrt().tolist()
            if distance > tolerance * norm + NOISE_FACTOR * noise:
                self.distance = distance / norm if norm else math.inf


def _tolerance(policy: Policy) -> float:
    """Return the largest distance from the recomputed gradient, relative to the norm."""
    return TOLERANCE_ROUNDED if policy.scorer.training_rounding else TOLERANCE


def _mean_by_weights(batch: Batch, passes: Passes) -> Vector:
    """Return the step's gradient by its loss weights, (1, n) per bucket. Collective."""
    ones = torch.ones(len(batch.fold), 1, dtype=batch.loss_weights.logps.dtype, device=batch.fold.device)
    rows = torch.arange(len(batch.fold), device=batch.fold.device)
    parts = [rows[part.start : part.stop] for part in batch.microbatch_rows]
    (gradient,) = passes.gradients(batch.rollout, parts, Weightings([batch.loss_weights], ones / passes.ranks.count))
    return gradient


def _compare_folds(
    batch: Batch, passes: Passes, by_fold: FoldVectors | None, fold_group: FoldGroup, squares: Tensor
) -> tuple[float, float, float] | None:
    """Recompute the gradient of these folds and compare it with the caught one. Collective.

    If fold gradients are not kept, only the norms are compared.

    Args:
        batch: The step's sequences and folds.
        passes: Recomputes the gradient.
        by_fold: The caught gradients of all folds. None if they are not kept.
        fold_group: The folds that are compared.
        squares: (K,), the square norms of the caught gradients.

    Returns:
        Norms over all ranks: of the larger of both gradients, of their difference, and of the difference between two
        recomputed gradients with other dropout masks, 0 without dropout. None if the scores of the further passes are
        not training's up to rounding and dropout, so that the comparison says nothing about the loss.
    """
    device = squares.device
    gradient, scores = _recompute(batch, passes, fold_group)
    square = dot(gradient, gradient)
    sq_distance = torch.zeros_like(square)
    if by_fold is not None:
        sq_distance = _sq_distance(by_fold.means(fold_group.folds), gradient)
    training = [(part, _rows_of_scores(batch.scores, part)) for part, _ in scores]
    sq_noise = torch.zeros_like(square)
    scores_noise = torch.zeros(2, dtype=square.dtype, device=device)
    if has_dropout(passes.policy.model):
        with preserve_rng(device):
            seed_torch(SEED, device=device)
            other_gradient, other_scores = _recompute(batch, passes, fold_group)
        sq_noise = _sq_distance(other_gradient, gradient)
        scores_noise = _score_distance(other_scores, scores).to(square)
    scores_off = _score_distance(training, scores).to(square)
    sums = passes.ranks.reduce(torch.cat([square, sq_distance, sq_noise, scores_off, scores_noise]))
    square, sq_distance, sq_noise, (off, num_tokens), (noise, _) = sums.split([len(fold_group.folds)] * 3 + [2, 2])
    caught_square = squares[fold_group.folds.start : fold_group.folds.stop].to(square)
    if by_fold is None:
        sq_distance = (caught_square.sqrt() - square.sqrt()).square()
    tolerance = SAME_SCORES_ROUNDED if passes.policy.scorer.training_rounding else SAME_SCORES
    is_same_policy = float(off) <= tolerance * float(num_tokens) + NOISE_FACTOR * float(noise)
    if not is_same_policy:  # also if scores are not finite
        return None
    norm = math.sqrt(max(float(caught_square.sum()), float(square.sum())))
    return norm, _root(sq_distance), _root(sq_noise)


def _recompute(batch: Batch, passes: Passes, fold_group: FoldGroup) -> tuple[Vector, list[tuple[Tensor, Scores]]]:
    """Return the gradient of these folds by their loss weights, with the scores it is made of. Collective.

    Returns:
        The gradient, (folds, n) per bucket, and this rank's rows of each pass with their scores, without graph.
    """
    scores: list[tuple[Tensor, Scores]] = []
    rows_of_folds = slice(fold_group.rows_per_pass[0].start, fold_group.rows_per_pass[-1].stop)
    num_weights = batch.loss_weights.stacked()[:, rows_of_folds].count_nonzero()
    has_weight = passes.ranks.any(num_weights)
    indices = torch.arange(len(batch.fold), device=batch.fold.device)
    parts = [indices[part.start : part.stop] for part in fold_group.rows_per_pass] if has_weight else []
    weightings = Weightings(
        [batch.loss_weights],
        passes.shares_of_folds(batch),
        on_scores=lambda part, fresh: scores.append((part, fresh.detached())),
    )
    (gradient,) = passes.gradients(batch.rollout, parts, weightings, len(fold_group.folds), len(parts))
    return gradient, scores


def _rows_of_scores(scores: Scores, rows: Tensor) -> Scores:
    return Scores(scores.logps[rows], scores.entropies[rows], scores.mask[rows])


def _score_distance(training: list[tuple[Tensor, Scores]], recomputed: list[tuple[Tensor, Scores]]) -> Tensor:
    """Return Σ |difference| of log-probabilities over the tokens of `recomputed`, and their number, (2,) fp64."""
    total = torch.zeros(2, dtype=torch.float64)
    for (_, first), (_, second) in zip(training, recomputed, strict=True):
        is_token = second.mask.bool()
        difference = (first.logps[:, : is_token.shape[1]] - second.logps)[is_token].double().abs()
        total = total.to(difference) + torch.stack([difference.sum(), is_token.sum().to(difference)])
    return total


def _sq_distance(caught: Vector, recomputed: Vector) -> Tensor:
    """Return the squared norms of the differences of two sets of vectors, (folds,)."""
    differences = [part.to(exact) - exact for part, exact in zip(caught, recomputed, strict=True)]
    return dot(differences, differences)


def _root(squares: Tensor) -> float:
    return math.sqrt(max(float(squares.sum()), 0.0))
