"""What a step would do if it were made otherwise: products of each fold's directions with the difference of the steps.

    Δ_(−k) = δθ_(−k)(changed) − δθ_(−k)          the other folds alone would have made both, each with its own clipping

A change gives the step another gradient, (1 + a) g + b D, where D is the gradient of further weights on the same
scores (a basis), other learning rates, or another threshold of clipping. One basis serves all its multiples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.batch import Batch
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.policy import Policy
from rl_training.engine.updates import Piece, StepsWithoutFolds, clipping
from rl_training.mathematics.vectors import Layout, Vector, add, dot, pairs_dot, rows_dot


@dataclass(frozen=True)
class Change:
    """How the step is made otherwise. By default, not at all."""

    own: float = 0.0  # a
    of_basis: float = 0.0  # b
    lr_factor: float = 1.0
    max_grad_norm: float | None = None  # None: as it is

    def times(self, factor: float) -> Change:
        """Returns so much of the change in gradient and learning rates."""
        lr_factor = 1.0 + factor * (self.lr_factor - 1.0)
        return Change(factor * self.own, factor * self.of_basis, lr_factor, self.max_grad_norm)


@dataclass(frozen=True)
class Basis:
    """The gradient of further weights: D, its mean over all folds of all ranks, and D_k of each fold of this rank."""

    mean: Vector
    rows: Vector  # (K, n) of each bucket


@dataclass(frozen=True)
class Direction:
    """A direction of each fold of this rank, factor · rows, and its sum over all ranks, factor · total."""

    rows: Vector  # (K, n) of each bucket
    total: Vector  # Σ n_k rows_k
    factor: float = 1.0


def basis_of(
    batch: Batch,
    policy: Policy,
    parameters: Sequence[Tensor],
    layout: Layout,
    weights: LossWeights,
    reduce: Callable[[Tensor], Tensor],
) -> Basis:
    """Returns the gradient of these weights by fold: a forward pass and a backward over the sequences that have any.

    A collective: the mean over ranks is of parameter size, as training's own.
    """
    weighed = (weights.logps != 0).any(dim=1)
    if weights.entropies is not None:
        weighed |= (weights.entropies != 0).any(dim=1)
    sizes = torch.bincount(batch.fold).double()
    rows, mean = layout.zeros(batch.num_folds), layout.zeros()
    at_once = max(len(part) for part in batch.microbatch_rows)
    for k in range(batch.num_folds):
        row = [part[k] for part in rows]
        for some in (weighed & (batch.fold == k)).nonzero().squeeze(1).split(at_once):
            if len(some):
                gradient = layout.vector(weights.gradient(policy.score(batch.rollout, some), some, parameters))
                add(row, gradient, 1.0 / float(sizes[k]))
        add(mean, row, float(sizes[k]))
    number = float(reduce(sizes.sum()))
    return Basis([reduce(part) / number for part in mean], rows)


class ChangedSteps:
    """The steps without each fold of this rank, and what they would be with a change."""

    def __init__(self, plain: StepsWithoutFolds, basis: Basis | None = None) -> None:
        self._plain, self._basis = plain, basis
        self._of_basis = None
        self._squares = [dot(plain.gradient, plain.gradient)]
        if basis is not None:
            self._of_basis = dataclasses.replace(plain, gradient=basis.mean, rows=basis.rows)
            self._squares += [dot(plain.gradient, basis.mean), dot(basis.mean, basis.mean)]
        self._clips = plain.clips(plain.gradients, slice(None))

    def products(self, change: Change | None, directions: Sequence[Direction]) -> tuple[Tensor, Tensor]:
        """Returns X_k · Δ_(−k) of each fold and Σ_{j≠l} n_j X_j · (Δ_(−l) − Δ) without each, both (K, directions).

        Of each direction X. None for the plain step itself, δθ in the place of Δ.
        """
        sizes = self._plain.sizes.unsqueeze(1)
        own, of_whole, of_sum = (torch.zeros_like(sizes).repeat(1, len(directions)) for _ in range(3))
        for piece, moved, whole in self._differences(change):
            for number, direction in enumerate(directions):
                rows, total = piece.of(direction.rows).to(moved.device), piece.of(direction.total)
                own[:, number] += direction.factor * pairs_dot(rows, moved)
                of_whole[:, number] += direction.factor * rows_dot(rows, whole)
                of_sum[:, number] += direction.factor * rows_dot(moved - whole, total)
        return own, of_sum - sizes * (own - of_whole)

    def forward(self, change: Change, direction: Direction) -> Tensor:
        """Returns Σ_k n_k X_k · δθ_(−k)(changed) over the folds of this rank, a scalar."""
        products = torch.zeros_like(self._plain.sizes)
        clips = self._changed_clips(change)
        for piece in self._plain.pieces:
            moved = _step(_scaled(piece, change), self._changed(change, slice(None), piece), clips)
            products += pairs_dot(piece.of(direction.rows).to(moved.device), moved)
        return direction.factor * (self._plain.sizes @ products)

    def _differences(self, change: Change | None) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Yields each piece, Δ_(−k) of all folds, (K, n), and Δ of the whole step, (n,)."""
        plain = self._plain
        whole_clip = clipping(self._squares[0], plain.max_grad_norm)
        if change is not None:
            clips, changed_clip = self._changed_clips(change), self._changed_clip(change)
        for piece in plain.pieces:
            moved = _step(piece, plain.gradients(slice(None), piece), self._clips)
            whole = _step(piece, piece.of(plain.gradient), whole_clip)
            if change is not None:
                scaled = _scaled(piece, change)
                moved = _step(scaled, self._changed(change, slice(None), piece), clips) - moved
                whole = _step(scaled, self._mixed(change, piece), changed_clip) - whole
            yield piece, moved, whole

    def _changed(self, change: Change, folds: slice, piece: Piece) -> Tensor:
        """Returns the changed gradient without each of these folds, (folds, n), not clipped."""
        gradient = (1.0 + change.own) * self._plain.gradients(folds, piece)
        if change.of_basis == 0.0:
            return gradient
        assert self._of_basis is not None
        return gradient.add_(self._of_basis.gradients(folds, piece), alpha=change.of_basis)

    def _mixed(self, change: Change, piece: Piece) -> Tensor:
        """Returns the changed mean gradient, (n,), not clipped."""
        gradient = (1.0 + change.own) * piece.of(self._plain.gradient)
        if change.of_basis == 0.0:
            return gradient
        assert self._basis is not None
        return gradient.add_(piece.of(self._basis.mean), alpha=change.of_basis)

    def _changed_clips(self, change: Change) -> Tensor:
        plain = self._threshold(change)
        return plain.clips(lambda folds, piece: self._changed(change, folds, piece), slice(None))

    def _changed_clip(self, change: Change) -> Tensor:
        a, b = 1.0 + change.own, change.of_basis
        factors = (a * a, 2.0 * a * b, b * b)
        square = torch.stack([f * s for f, s in zip(factors, self._squares, strict=False)]).sum()
        return clipping(square, self._threshold(change).max_grad_norm)

    def _threshold(self, change: Change) -> StepsWithoutFolds:
        if change.max_grad_norm is None:
            return self._plain
        return dataclasses.replace(self._plain, max_grad_norm=change.max_grad_norm)


def _scaled(piece: Piece, change: Change) -> Piece:
    if change.lr_factor == 1.0:
        return piece
    return dataclasses.replace(piece, state=dataclasses.replace(piece.state, lr=change.lr_factor * piece.state.lr))


def _step(piece: Piece, gradient: Tensor, clips: Tensor) -> Tensor:
    """Returns the step that the optimizer makes of a gradient in this piece, (n,), or of several, (K, n)."""
    return piece.state.delta(piece.param, clips.to(gradient).unsqueeze(-1) * gradient).total
