"""The effect of changing a step: products of each fold's directions with the difference of the two steps.

    Δ_(−k) = δθ_(−k)(changed) − δθ_(−k)          both made by the other folds alone, each with its own clipping

A change gives the step another gradient, (1 + a) g + b D, where D is the gradient of further weights on the same
scores (a basis), other learning rates, or another threshold of clipping. One basis serves all its multiples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.entropy.fold_gradients import add_gradients, passes_in_lockstep, shares_of_folds
from rl_training.gradients.loss_weights import LossWeights
from rl_training.optim.leave_one_out import EVERY_FOLD, FoldMeans, LeaveOneOutUpdates, fold_means
from rl_training.optim.updates import Entries, OptimizerPiece, clipping
from rl_training.parallel.vectors import Vector, dots
from rl_training.step.data import Step

CHUNK_BYTES = 2**28  # bytes of bases' rows that are held together
SHARE_OF_GPU = 1 / 32  # the same on a GPU, of its memory
ROUNDING = 1e-11  # of a sum of squares of weights in fp32: what they may be off a multiple


@dataclass(frozen=True)
class Change:
    """How the step is changed. By default, not at all."""

    gradient: float = 0.0  # a
    basis: float = 0.0  # b
    lr_factor: float = 1.0
    max_grad_norm: float | None = None  # None: as it is


@dataclass(frozen=True)
class Direction:
    """A direction of each fold, factor · rows, and where it is given that of all folds, factor · mean."""

    rows: Vector  # (F, n) of each bucket
    mean: Entries | None = None  # Σ n_k rows_k / Σ n_k, where the step is not taken as given
    factor: float = 1.0


def changes_by_basis(
    further: Mapping[str, Tensor], plain: Tensor | None, reduce: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Change], dict[str, dict[str, Change]]]:
    """Return the changes that need no basis, by name, and by the name of each whose weights are a basis those of it.

    further  what each adds to the `plain` weights, of the same shape. A collective: the same on all ranks
    plain    whose gradient is the step's own; None where the step's has other terms too

    The loss scaled as a whole needs no basis. Positive samples alone and negative ones alone share one, a bonus of any
    strength another. This is found from the weights.
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
    """Return the factors with which a vector is a sum of multiples of others; None if it is not.

    products  the inner products of all vectors        row, others  their numbers
    rounding  of its square: what it may be off

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


def iter_basis_gradients(step: Step, weights: Sequence[LossWeights]) -> Iterator[tuple[int, FoldMeans]]:
    """Yield the number and the gradient by fold of each of these weights, in an order that is the same on all ranks.

    The first comes first. A forward pass over the sequences with any weight, and a backward. Weights on at least half
    of all such sequences share their forward passes, as many as fit. A collective.
    """
    if not weights:
        return
    layout = step.gradients.layout
    batch = step.batch
    counts = torch.stack([rows_with_weight(subset).sum() for subset in (*([weight] for weight in weights), weights)])
    shares = step.ranks.reduce(counts.double()).tolist()
    dense = [number for number in range(len(weights)) if 2.0 * shares[number] >= shares[-1]]
    fitting = _bytes_at_once(layout.device) // (layout.dtype.itemsize * batch.num_folds * max(1, layout.num_entries))
    chunk_size = max(
        1, -int(step.ranks.max(torch.tensor(-float(fitting), dtype=torch.float64, device=batch.fold.device)))
    )
    shared_passes = [dense[first : first + chunk_size] for first in range(0, len(dense), chunk_size)]
    single_passes = [[number] for number in range(len(weights)) if number not in dense]
    sizes = step.fold_sizes
    shares_of_folds = (sizes / sizes.sum()).to(layout.device, layout.dtype)
    for numbers in sorted(shared_passes + single_passes):
        rows_of_weights = _rows_of(step, [weights[number] for number in numbers])
        for number in numbers:
            rows = rows_of_weights.pop(0)
            yield number, fold_means([shares_of_folds @ part for part in rows], rows, sizes)
            del rows  # before the next are made


def _bytes_at_once(device: torch.device) -> int:
    if device.type != "cuda":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, int(torch.cuda.get_device_properties(device).total_memory * SHARE_OF_GPU))


def _rows_of(step: Step, weights: Sequence[LossWeights]) -> list[Vector]:
    """Return the mean gradient of each fold, (F, n) of each bucket, for each of these weights."""
    layout = step.gradients.layout
    batch = step.batch
    rows_of_weights = [layout.zeros(batch.num_folds) for _ in weights]
    shares = shares_of_folds(step)
    for group, passes in passes_in_lockstep(step, rows_with_weight(weights)):
        targets = [[part[group.folds.start : group.folds.stop] for part in rows] for rows in rows_of_weights]
        for rows in passes:
            add_gradients(step, targets, rows, weights, shares)
    return rows_of_weights


def rows_with_weight(weights: Sequence[LossWeights]) -> Tensor:
    """Return the sequences that have any of these weights, (B,)."""
    parts = [part for weight in weights for part in (weight.logps, weight.entropies) if part is not None]
    return torch.stack([(part != 0).any(dim=1) for part in parts]).any(dim=0)


class ChangedSteps:
    """The steps without each fold and what they would be with changes that share a basis.

    Tables have a row for each fold that is left out, and last one for the whole step.
    """

    def __init__(
        self, plain: LeaveOneOutUpdates, reduce: Callable[[Tensor], Tensor], basis: FoldMeans | None = None
    ) -> None:
        """basis: the gradient of further weights, D. A collective, as is `products`."""
        self._plain = plain
        self._reduce = reduce
        self._pieces = plain.pieces.halved()
        self._sizes = plain.gradient.sizes.to(plain.gradient.share_of_mean.device)
        self._terms = [plain.gradient] if basis is None else [plain.gradient, basis]  # of a changed gradient
        self._squares = self._inner_products()

    def products(
        self, changes: Sequence[Change | None], directions: Sequence[Direction]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return X_k · Δ_(−k) of each fold and Σ_{j≠l} n_j X_j · (Δ_(−l) − Δ) without each, both (F, directions).

        For each change, and each direction X; the second is 0 of a direction without a mean. A change of None is the
        plain step itself, δθ in the place of Δ.
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
        """Return those of the step and of the basis, not clipped, (F + 1, n) each."""
        return [torch.cat([term.without(EVERY_FOLD, piece), piece.of(term.mean)[None]]) for term in self._terms]

    def _inner_products(self) -> Tensor:
        """Return (F + 1, s, s): g · g, and with a basis g · D and D · D."""
        count = len(self._terms)
        squares = self._sizes.new_zeros(len(self._sizes) + 1, count, count)
        for piece in self._pieces:
            gradients = self._gradients(piece)
            for i in range(count):
                for j in range(count):
                    squares[:, i, j] += dots(gradients[i], gradients[j])
        return self._reduce(squares)

    def _steps(self, piece: OptimizerPiece, gradients: Sequence[Tensor], change: Change) -> Tensor:
        """Return the steps that the optimizer makes of the changed gradients in this piece, (F + 1, n)."""
        shares = [1.0 + change.gradient, change.basis][: len(gradients)]
        vector = self._squares.new_tensor(shares)
        square = (self._squares @ vector @ vector).clamp(min=0.0)  # below 0 by rounding only
        clips = clipping(square, self._plain.max_grad_norm if change.max_grad_norm is None else change.max_grad_norm)
        factors = torch.outer(clips, vector).to(gradients[0]).unsqueeze(2)
        gradient = factors[:, 0] * gradients[0]
        for number, further in enumerate(gradients[1:], 1):
            gradient.addcmul_(factors[:, number], further)
        state = dataclasses.replace(piece.state, lr=change.lr_factor * piece.state.lr)
        return dataclasses.replace(piece, state=state).total(gradient)


class GradientParts(ChangedSteps):
    """The part of each step that comes from a basis, as a summand of its fresh gradient.

        a_(−k) D_(−k),      a the factor on the gradient: of AdamW −lr P (1−β1)/(1−β1^t), clipping included

    a is the plain step's, so parts of bases that add up to g add up to the part of g, which is the one without a basis.
    `products([None], …)` are products with these parts.
    """

    def _steps(self, piece: OptimizerPiece, gradients: Sequence[Tensor], change: Change) -> Tensor:
        clips = clipping(self._squares[:, 0, 0], self._plain.max_grad_norm).to(gradients[0]).unsqueeze(1)
        return piece.gradient_factor(clips * gradients[0]) * clips * gradients[-1]
