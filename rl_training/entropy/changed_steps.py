"""The effect of changing a step: products of each fold's directions with the difference of the two steps.

    Δ_(−k) = δθ_(−k)(changed) − δθ_(−k)          both from the other folds alone, each with its own clipping

A change gives the step another gradient, (1 + a) g + b D, another learning rate, or another clipping threshold. D is
the gradient of further weights on the same scores, a basis; one basis serves all its multiples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.gradients.loss_weights import LossWeights, rows_with_weight
from rl_training.optim.leave_one_out import EVERY_FOLD, FoldMeans, LeaveOneOutUpdates, fold_means
from rl_training.optim.updates import Entries, OptimizerPiece, clipping
from rl_training.parallel.vectors import Vector, dots
from rl_training.step.batch import Batch
from rl_training.step.runtime import Runtime, rows_by_fold, shares_of_folds

CHUNK_BYTES = 2**28  # bytes of bases' rows to hold at once
SHARE_OF_GPU = 1 / 32  # the same on a GPU, as a share of its memory
ROUNDING = 1e-11  # relative error of a sum of squares of fp32 weights within which they count as multiples


@dataclass(frozen=True)
class Change:
    """A change of the step; the defaults change nothing."""

    gradient: float = 0.0  # a, of the step's own gradient
    basis: float = 0.0  # b, of the basis D
    lr_factor: float = 1.0  # of all learning rates
    max_grad_norm: float | None = None  # clipping threshold; None: the step's own


@dataclass(frozen=True)
class Direction:
    """A direction X of each fold, factor · rows, and of all folds, factor · mean."""

    rows: Vector  # (F, n) per bucket
    mean: Entries | None = None  # Σ n_k rows_k / Σ n_k; None: leave-one-out corrections of the step are not needed
    factor: float = 1.0


def changes_by_basis(
    further: Mapping[str, Tensor], plain: Tensor | None, reduce: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Change], dict[str, dict[str, Change]]]:
    """Find out which changed losses share a basis, from their weights. A collective, alike on all ranks.

    A multiple of the loss needs no basis. Positive samples only and negative samples only share one basis; bonuses of
    any strength share another.

    Args:
        further: what each changed loss adds to the `plain` weights, of the same shape, by name.
        plain: weights whose gradient is the step's own; None where the step's loss has other terms too.
        reduce: sums a tensor over the processes.

    Returns:
        The changes that need no basis, by name; and for each basis, under the name of the loss that gives it, the
        changes that are multiples of it, by name.
    """
    without_basis: dict[str, Change] = {}
    by_basis: dict[str, dict[str, Change]] = {}
    if not further:
        return without_basis, by_basis
    zeros = torch.zeros_like(next(iter(further.values())))
    vectors = torch.stack([zeros if plain is None else plain, *further.values()]).double().flatten(1)
    products = reduce(vectors @ vectors.T)
    rows = {name: row for row, name in enumerate(further, 1)}
    for name, row in rows.items():
        candidates = [([0], without_basis), *(([0, rows[basis]], changes) for basis, changes in by_basis.items())]
        for indices, changes in candidates:
            factors = multiples(products, row, indices)
            if factors is not None:
                changes[name] = Change(*factors)
                break
        else:
            by_basis[name] = {name: Change(0.0, 1.0)}
    return without_basis, by_basis


def multiples(products: Tensor, row: int, indices: Sequence[int], rounding: float = ROUNDING) -> list[float] | None:
    """Return the factors of vector `row` as a linear combination of other vectors; None if it is none.

    Args:
        products: (n, n), the inner products of all vectors.
        row: index of the vector.
        indices: of the other vectors.
        rounding: the largest squared distance from a combination, relative to the vector's square norm.

    >>> vectors = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [3.0, -1.0, 6.0]], dtype=torch.float64)
    >>> [round(factor, 9) for factor in multiples(vectors @ vectors.T, 2, [0, 1])]
    [3.0, -1.0]
    """
    gram = products[indices][:, indices]
    with_others = products[indices, row]
    square = products[row, row]
    scale = gram.diagonal().sqrt().where(gram.diagonal() > 0, 1.0)
    factors = torch.linalg.pinv(gram / scale / scale.unsqueeze(1), hermitian=True) @ (with_others / scale) / scale
    rest = square - factors @ with_others
    return factors.tolist() if float(rest) <= rounding * float(square) else None


def iter_basis_gradients(
    batch: Batch, runtime: Runtime, weights: Sequence[LossWeights]
) -> Iterator[tuple[int, FoldMeans]]:
    """Yield (index, per-fold gradient) for each weighting, in the same order on all ranks, index 0 first. A collective.

    Each takes forward passes and backwards over the sequences with any weight. Weightings that cover at least half of
    all such sequences share forward passes, as many as fit into memory.
    """
    if not weights:
        return
    layout = runtime.layout
    counts = torch.stack([rows_with_weight(subset).sum() for subset in (*([weight] for weight in weights), weights)])
    shares = runtime.ranks.reduce(counts.double()).tolist()
    dense = [number for number in range(len(weights)) if 2.0 * shares[number] >= shares[-1]]
    fitting = _bytes_at_once(layout.device) // (layout.dtype.itemsize * batch.num_folds * max(1, layout.num_entries))
    chunk_size = max(
        1, -int(runtime.ranks.max(torch.tensor(-float(fitting), dtype=torch.float64, device=batch.fold.device)))
    )
    shared_passes = [dense[first : first + chunk_size] for first in range(0, len(dense), chunk_size)]
    single_passes = [[number] for number in range(len(weights)) if number not in dense]
    sizes = batch.fold_sizes
    shares_of_sequences = shares_of_folds(batch, runtime.ranks.count)
    shares_of_means = (sizes / sizes.sum()).to(layout.device, layout.dtype)
    for numbers in sorted(shared_passes + single_passes):
        rows_of_weights = rows_by_fold(batch, runtime, [weights[number] for number in numbers], shares_of_sequences)
        for number in numbers:
            rows = rows_of_weights.pop(0)
            yield number, fold_means([shares_of_means @ part for part in rows], rows, sizes)
            del rows  # before the next are made


def _bytes_at_once(device: torch.device) -> int:
    if device.type != "cuda":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, int(torch.cuda.get_device_properties(device).total_memory * SHARE_OF_GPU))


class ChangedSteps:
    """The steps without each fold, as they are and with changes that share a basis.

    Tables have a row for each fold that is left out, and a last row for the whole step.
    """

    def __init__(
        self, plain: LeaveOneOutUpdates, reduce: Callable[[Tensor], Tensor], basis: FoldMeans | None = None
    ) -> None:
        """Calculate the gradients' inner products. A collective, as is `products`.

        Args:
            plain: the steps as they are.
            reduce: sums a tensor over the processes.
            basis: D, the gradient of further weights.
        """
        self._plain = plain
        self._reduce = reduce
        self._pieces = plain.pieces.halved()
        self._sizes = plain.gradient.sizes.to(plain.gradient.share_of_mean.device)
        self._terms = [plain.gradient] if basis is None else [plain.gradient, basis]  # of a changed gradient
        self._squares = self._inner_products()

    def products(
        self, changes: Sequence[Change | None], directions: Sequence[Direction]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the products of each change with each direction X, by fold. A collective.

        Args:
            changes: None stands for the step itself, with δθ in place of Δ.
            directions: X.

        Returns:
            For each change, X_k · Δ_(−k) of each fold k, and the correction Σ_{j≠l} n_j X_j · (Δ_(−l) − Δ)
            of each fold l, both (F, directions). The correction is 0 for a direction without a mean.
        """
        of_fold, corrections = (
            self._sizes.new_zeros(len(changes), len(self._sizes), len(directions)) for _ in range(2)
        )
        for piece in self._pieces:
            gradients = self._gradients(piece)
            plain = self._steps(piece, gradients, Change())
            for c, change in enumerate(changes):
                moved = plain if change is None else self._steps(piece, gradients, change).sub_(plain)
                for number, direction in enumerate(directions):
                    rows = piece.of(direction.rows).to(moved.device)
                    of_fold[c, :, number] += direction.factor * dots(rows, moved[:-1])
                    if direction.mean is not None:
                        less = moved[:-1] - moved[-1]
                        total = self._sizes.sum() * dots(less, piece.of(direction.mean))
                        of_rest = total - self._sizes * dots(rows, less)
                        corrections[c, :, number] += direction.factor * of_rest
                        del less
                del moved
            del gradients, plain  # before those of the next piece are made
        parts = self._reduce(torch.stack([of_fold, corrections])).cpu()
        return list(zip(*parts, strict=True))

    def _gradients(self, piece: OptimizerPiece) -> list[Tensor]:
        """Return the gradients of the step and of the basis in a piece, before clipping, (F + 1, n) each."""
        return [torch.cat([term.without(EVERY_FOLD, piece), piece.of(term.mean)[None]]) for term in self._terms]

    def _inner_products(self) -> Tensor:
        """Return the inner products g · g and, with a basis, g · D and D · D, (F + 1, s, s). A collective."""
        count = len(self._terms)
        squares = self._sizes.new_zeros(len(self._sizes) + 1, count, count)
        for piece in self._pieces:
            gradients = self._gradients(piece)
            for i in range(count):
                for j in range(count):
                    squares[:, i, j] += dots(gradients[i], gradients[j])
        return self._reduce(squares)

    def _steps(self, piece: OptimizerPiece, gradients: Sequence[Tensor], change: Change) -> Tensor:
        """Return the optimizer's steps with the changed gradients in a piece, (F + 1, n)."""
        shares = [1.0 + change.gradient, change.basis][: len(gradients)]
        vector = self._squares.new_tensor(shares)
        square = (self._squares @ vector @ vector).clamp(min=0.0)  # below 0 by rounding only
        clips = clipping(square, self._plain.max_grad_norm if change.max_grad_norm is None else change.max_grad_norm)
        factors = torch.outer(clips, vector).to(gradients[0]).unsqueeze(2)
        gradient = factors[:, 0] * gradients[0]
        for number, further in enumerate(gradients[1:], 1):
            gradient.addcmul_(factors[:, number], further)
        state = piece.state.replace(lr=change.lr_factor * piece.state.lr)
        return dataclasses.replace(piece, state=state).total(gradient)


class GradientParts(ChangedSteps):
    """The part of each step that comes from one summand of its gradient, the basis.

        a_(−k) D_(−k),      a the factor of the gradient in the step: for AdamW −lr P (1−β1)/(1−β1^t), with clipping

    a is the plain step's, so the parts of bases that add up to g add up to the part of g, which is the part without a
    basis. `products([None], …)` are products with these parts.
    """

    def _steps(self, piece: OptimizerPiece, gradients: Sequence[Tensor], change: Change) -> Tensor:
        clips = clipping(self._squares[:, 0, 0], self._plain.max_grad_norm).to(gradients[0]).unsqueeze(1)
        return piece.gradient_factor(clips * gradients[0]) * clips * gradients[-1]
