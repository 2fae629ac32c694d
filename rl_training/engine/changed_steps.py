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

AT_ONCE = 2**28  # bytes of bases' rows that are held together


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


def bases_of(
    batch: Batch,
    policy: Policy,
    parameters: Sequence[Tensor],
    layout: Layout,
    weights: Sequence[LossWeights],
    reduce: Callable[[Tensor], Tensor],
) -> Iterator[tuple[int, Basis]]:
    """Yields the number and the gradient by fold of each of these weights, in an order that is the same on all ranks.

    A forward pass over the sequences that have any, and a backward: weights on at least half of the sequences share
    their forward passes, as many of them as fit AT_ONCE. A collective: means over ranks are of parameter size, as
    training's own.
    """
    if not weights:
        return
    counts = [float(weighed([of]).sum()) for of in weights]
    shares = reduce(torch.tensor([*counts, float(len(batch.fold))], dtype=torch.float64, device=batch.fold.device))
    dense = [number for number in range(len(weights)) if 2.0 * shares[number] >= shares[-1]]
    at_once = max(1, AT_ONCE // (layout.dtype.itemsize * batch.num_folds * layout.num_entries))
    together = [dense[first : first + at_once] for first in range(0, len(dense), at_once)]
    alone = [[number] for number in range(len(weights)) if number not in dense]
    sizes = torch.bincount(batch.fold).double()
    total = float(reduce(sizes.sum()))
    for numbers in together + alone:
        found = _rows_of(batch, policy, parameters, layout, [weights[number] for number in numbers])
        for number, rows in zip(numbers, found, strict=True):
            yield number, Basis([reduce(sizes.to(part) @ part) / total for part in rows], rows)


def _rows_of(
    batch: Batch, policy: Policy, parameters: Sequence[Tensor], layout: Layout, weights: Sequence[LossWeights]
) -> list[Vector]:
    """Returns the mean gradient of each fold, (K, n) of each bucket, for each of these weights."""
    learned, last = weighed(weights), len(weights) - 1
    found = [layout.zeros(batch.num_folds) for _ in weights]
    at_once = max(len(part) for part in batch.microbatch_rows)
    for k in range(batch.num_folds):
        share = 1.0 / float((batch.fold == k).sum())
        for some in (learned & (batch.fold == k)).nonzero().squeeze(1).split(at_once):
            if not len(some):
                continue
            fresh = policy.score(batch.rollout, some)
            for number, (of, rows) in enumerate(zip(weights, found, strict=True)):
                gradient = layout.vector(of.gradient(fresh, some, parameters, share, keep_graph=number < last))
                add([part[k] for part in rows], gradient)
    return found


def weighed(weights: Sequence[LossWeights]) -> Tensor:
    """Returns the sequences that have any of these weights, (B,)."""
    parts = [part for of in weights for part in (of.logps, of.entropies) if part is not None]
    return torch.stack([(part != 0).any(dim=1) for part in parts]).any(dim=0)


class ChangedSteps:
    """The steps without each fold of this rank, and what they would be with changes that share a basis."""

    def __init__(self, plain: StepsWithoutFolds, basis: Basis | None = None) -> None:
        self._plain, self._basis = plain, basis
        self._of_basis = None
        if basis is not None:
            self._of_basis = dataclasses.replace(plain, gradient=basis.mean, rows=basis.rows)
        self._squares = self._inner_products()

    def products(
        self, changes: Sequence[Change | None], directions: Sequence[Direction]
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns X_k · Δ_(−k) of each fold and Σ_{j≠l} n_j X_j · (Δ_(−l) − Δ) without each, both (K, directions).

        For each change, and each direction X. None for the plain step itself, δθ in the place of Δ.
        """
        sizes = self._plain.sizes.unsqueeze(1)
        own, of_whole, of_sum = (sizes.new_zeros(len(changes), len(sizes), len(directions)) for _ in range(3))
        for piece, differences in self._differences(changes):
            for number, direction in enumerate(directions):
                total = piece.of(direction.total)
                rows = piece.of(direction.rows).to(total.device)
                for c, (moved, whole) in enumerate(differences):
                    own[c, :, number] += direction.factor * pairs_dot(rows, moved)
                    of_whole[c, :, number] += direction.factor * rows_dot(rows, whole)
                    of_sum[c, :, number] += direction.factor * rows_dot(moved - whole, total)
        return list(zip(own, of_sum - sizes * (own - of_whole), strict=True))

    def forward(self, change: Change, direction: Direction) -> Tensor:
        """Returns Σ_k n_k X_k · δθ_(−k)(changed) over the folds of this rank, a scalar."""
        products = torch.zeros_like(self._plain.sizes)
        for piece in self._plain.pieces:
            gradients, further = self._gradients(piece)
            moved = _step(_scaled(piece, change), _mixed(change, gradients, further), self._clips(change)[:-1])
            products += pairs_dot(piece.of(direction.rows).to(moved.device), moved)
        return direction.factor * (self._plain.sizes @ products)

    def _differences(self, changes: Sequence[Change | None]) -> Iterator[tuple[Piece, list[tuple[Tensor, Tensor]]]]:
        """Yields each piece, and for each change Δ_(−k) of all folds, (K, n), and Δ of the whole step, (n,)."""
        plain_clips, clips = self._clips(Change()), [self._clips(change or Change()) for change in changes]
        for piece in self._plain.pieces:
            gradients, further = self._gradients(piece)
            mean, further_mean = piece.of(self._plain.gradient), self._mean_of_basis(piece)
            before = _step(piece, gradients, plain_clips[:-1])
            whole_before = _step(piece, mean, plain_clips[-1])
            differences = []
            for change, clip in zip(changes, clips, strict=True):
                if change is None:
                    differences.append((before, whole_before))
                    continue
                scaled = _scaled(piece, change)
                moved = _step(scaled, _mixed(change, gradients, further), clip[:-1])
                whole = _step(scaled, _mixed(change, mean, further_mean), clip[-1])
                differences.append((moved.sub_(before), whole.sub_(whole_before)))
            yield piece, differences

    def _gradients(self, piece: Piece) -> tuple[Tensor, Tensor | None]:
        """Returns g_(−k) of all folds, (K, n), and D_(−k), not clipped; None without a basis."""
        everything = slice(None)
        further = None if self._of_basis is None else self._of_basis.gradients(everything, piece)
        return self._plain.gradients(everything, piece), further

    def _mean_of_basis(self, piece: Piece) -> Tensor | None:
        return None if self._basis is None else piece.of(self._basis.mean)

    def _inner_products(self) -> Tensor:
        """Returns (3, K + 1): g · g, g · D and D · D of the gradients without each fold, and last of the whole ones."""
        folds = torch.zeros(3, len(self._plain.sizes), dtype=torch.float64, device=self._plain.sizes.device)
        for piece in self._plain.pieces:
            gradients, further = self._gradients(piece)
            folds[0] += pairs_dot(gradients, gradients)
            if further is not None:
                folds[1] += pairs_dot(gradients, further)
                folds[2] += pairs_dot(further, further)
        whole = folds.new_zeros(3, 1)
        whole[0] = dot(self._plain.gradient, self._plain.gradient)
        if self._basis is not None:
            whole[1] = dot(self._plain.gradient, self._basis.mean)
            whole[2] = dot(self._basis.mean, self._basis.mean)
        return torch.cat([folds, whole], dim=1)

    def _clips(self, change: Change) -> Tensor:
        """Returns the clip coefficients of the changed gradients without each fold, and last of the whole one."""
        a, b = 1.0 + change.own, change.of_basis
        squares = self._squares.new_tensor([a * a, 2.0 * a * b, b * b]) @ self._squares
        threshold = self._plain.max_grad_norm if change.max_grad_norm is None else change.max_grad_norm
        return clipping(squares.clamp(min=0.0), threshold)  # below 0 by rounding only


def _mixed(change: Change, gradients: Tensor, further: Tensor | None) -> Tensor:
    """Returns the changed gradients, not clipped, from those of the step and those of the basis."""
    mixed = (1.0 + change.own) * gradients
    return mixed if further is None or change.of_basis == 0.0 else mixed.add_(further, alpha=change.of_basis)


def _scaled(piece: Piece, change: Change) -> Piece:
    if change.lr_factor == 1.0:
        return piece
    return dataclasses.replace(piece, state=dataclasses.replace(piece.state, lr=change.lr_factor * piece.state.lr))


def _step(piece: Piece, gradient: Tensor, clips: Tensor) -> Tensor:
    """Returns the step that the optimizer makes of a gradient in this piece, (n,), or of several, (K, n)."""
    return piece.state.delta(piece.param, clips.to(gradient).unsqueeze(-1) * gradient).total
