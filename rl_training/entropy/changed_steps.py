"""The effect of changing a step: products of each fold's directions with the difference between the two updates.

    Δ_(−k) = δθ_(−k)(changed) − δθ_(−k)          both from the other folds alone, each with its own clipping

A change gives the step another gradient, (1 + a) g + b D, another learning rate, or another clipping threshold. D, the
basis, is the gradient of a loss with other weights on the same scores. Changes with multiples of D share one basis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.optim.leave_one_out import EVERY_FOLD, FoldMeans, LeaveOneOutUpdates
from rl_training.optim.updates import Entries, OptimizerPiece, clip_factors
from rl_training.parallel.fold_vectors import FoldVectors, fold_dtype
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sums import dots
from rl_training.step.batch import Batch
from rl_training.step.loss_weights import LossWeights, rows_with_weight
from rl_training.step.passes import Passes, Weightings

CHUNK_BYTES = 2**28  # how many bytes of the bases' gradients by fold to hold at once
SHARE_OF_GPU = 1 / 32  # on a GPU: this share of its memory instead, if that is more
TOLERANCE = 1e-11  # squared distance, relative to the squared norm, within which fp32 weights count as multiples


@dataclass(frozen=True)
class Change:
    """A change of the step. The defaults change nothing."""

    gradient: float = 0.0  # a: adds this multiple of the step's own gradient
    basis: float = 0.0  # b: adds this multiple of the basis D
    lr_factor: float = 1.0  # multiplies all learning rates
    max_grad_norm: float | None = None  # clipping threshold; None: the step's own


@dataclass(frozen=True)
class Direction:
    """A direction X: factor · by_fold for each fold, factor · mean over all folds."""

    by_fold: FoldVectors
    mean: Entries | None = None  # the folds' mean, weighted by n_k; None: no leave-one-out corrections are needed
    factor: float = 1.0


def changes_by_basis(
    added_weights: Mapping[str, Tensor], unchanged: Tensor | None, ranks: Ranks
) -> tuple[dict[str, Change], dict[str, dict[str, Change]]]:
    """Find out from their weights which changed losses share a basis. Collective; the result is the same on all ranks.

    A multiple of the loss needs no basis. "Positive samples only" and "negative samples only" share one basis; entropy
    bonuses of any strength share another.

    Args:
        added_weights: What each changed loss adds to the `unchanged` weights, by name, shaped like them.
        unchanged: Weights whose gradient is the step's own. None if the step's loss has other terms too.
        ranks: The ranks that train together.

    Returns:
        The changes that need no basis, by name. Then the changes that need one, by name, grouped by basis; a basis has
        the name of the loss that provides it.
    """
    without_basis: dict[str, Change] = {}
    by_basis: dict[str, dict[str, Change]] = {}
    if not added_weights:
        return without_basis, by_basis
    zeros = torch.zeros_like(next(iter(added_weights.values())))
    vectors = torch.stack([zeros if unchanged is None else unchanged, *added_weights.values()]).double().flatten(1)
    products = ranks.reduce(vectors @ vectors.T)
    indices_of = {name: index for index, name in enumerate(added_weights, 1)}
    for name, index in indices_of.items():
        candidates = [([0], without_basis), *(([0, indices_of[basis]], changes) for basis, changes in by_basis.items())]
        for indices, changes in candidates:
            factors = solve_combination(products, index, indices)
            if factors is not None:
                changes[name] = Change(*factors)
                break
        else:
            by_basis[name] = {name: Change(0.0, 1.0)}
    return without_basis, by_basis


def solve_combination(
    products: Tensor, index: int, indices: Sequence[int], tolerance: float = TOLERANCE
) -> list[float] | None:
    """Return the factors that make vector `index` a linear combination of other vectors, or None if it is not one.

    Args:
        products: Inner products of all vectors, (n, n).
        index: Index of the vector.
        indices: Indices of the other vectors.
        tolerance: Largest squared distance from a combination, relative to the vector's squared norm.

    >>> vectors = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [3.0, -1.0, 6.0]], dtype=torch.float64)
    >>> [round(factor, 9) for factor in solve_combination(vectors @ vectors.T, 2, [0, 1])]
    [3.0, -1.0]
    """
    gram = products[indices][:, indices]
    with_others = products[indices, index]
    square = products[index, index]
    scale = gram.diagonal().sqrt().where(gram.diagonal() > 0, 1.0)
    factors = torch.linalg.pinv(gram / scale / scale.unsqueeze(1), hermitian=True) @ (with_others / scale) / scale
    squared_distance = square - factors @ with_others
    return factors.tolist() if float(squared_distance) <= tolerance * float(square) else None


def iter_basis_gradients(
    batch: Batch, passes: Passes, weights: Sequence[LossWeights]
) -> Iterator[tuple[int, FoldMeans]]:
    """Yield (index, per-fold gradient) for each weighting, in the same order on all ranks, index 0 first. Collective.

    Each weighting takes forward passes and backwards over the sequences with a nonzero weight. Weightings that cover at
    least half of all such sequences share forward passes, as many at a time as fit into memory.
    """
    if not weights:
        return
    layout = passes.layout
    local_counts = [rows_with_weight(subset).sum() for subset in (*([weight] for weight in weights), weights)]
    *counts, total = passes.ranks.reduce(torch.stack(local_counts).double()).tolist()
    dense = [index for index, count in enumerate(counts) if 2.0 * count >= total]
    bytes_of_basis = fold_dtype(layout).itemsize * batch.num_folds * max(1, layout.num_entries)
    num_fitting = _chunk_bytes(layout.device) // bytes_of_basis
    chunk_size = max(1, passes.ranks.least(num_fitting, batch.fold.device))
    shared_passes = [dense[first : first + chunk_size] for first in range(0, len(dense), chunk_size)]
    single_passes = [[index] for index in range(len(weights)) if index not in dense]
    sizes = batch.fold_sizes
    shares_of_sequences = passes.shares_of_folds(batch)
    for indices in sorted(shared_passes + single_passes):
        chosen = [weights[index] for index in indices]
        weightings = Weightings(chosen, shares_of_sequences)
        gradients = passes.gradients_by_fold(batch, weightings, dtype=fold_dtype(layout))
        for index in indices:
            by_fold = gradients.pop(0)
            yield index, FoldMeans.of(by_fold.sum(sizes / sizes.sum()), by_fold, sizes)
            del by_fold  # free them before the next are made


def _chunk_bytes(device: torch.device) -> int:
    """Return how many bytes of the bases' gradients by fold to hold at once."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, int(torch.cuda.get_device_properties(device).total_memory * SHARE_OF_GPU))


class ChangedUpdates:
    """The updates without each fold, unchanged and with changes that share a basis.

    The constructor is collective: it calculates the gradients' inner products. Internal tables have a row for each fold
    that is left out, and a last row for the step itself.

    Args:
        unchanged: The updates as they are.
        basis: D. None: the changes need no basis.
    """

    def __init__(self, unchanged: LeaveOneOutUpdates, basis: FoldMeans | None = None) -> None:
        gradient = unchanged.gradient
        self._max_grad_norm = unchanged.max_grad_norm
        self._ranks = unchanged.ranks
        self._pieces = unchanged.pieces.halved()
        self._sizes = gradient.sizes.to(gradient.mean_coefficient.device)
        self._terms = [gradient] if basis is None else [gradient, basis]  # summands of a changed gradient
        self._grams = self._inner_products()

    def products(
        self, changes: Sequence[Change | None], directions: Sequence[Direction]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the products of each change with each direction X, by fold. Collective.

        Args:
            changes: The changes. None stands for the step itself, with δθ in place of Δ.
            directions: The directions X.

        Returns:
            For each change, X_k · Δ_(−k) of each fold k, and the correction Σ_{j≠l} n_j X_j · (Δ_(−l) − Δ)
            of each fold l, both (K, directions). The correction is 0 for a direction without a mean.
        """

        def differences(piece: OptimizerPiece, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
            unchanged = self._updates(piece, gradients, Change())
            for change in changes:
                yield unchanged if change is None else self._updates(piece, gradients, change).sub_(unchanged)

        return self._products(differences, len(changes), directions)

    def products_of_part(self, direction: Direction) -> Tensor:
        """Return the products of X with the part of each update that comes from the basis D, by fold. Collective.

            X_k · a_(−k) D_(−k)

        a is the gradient's factor in the update: for AdamW −lr P (1−β1)/(1−β1^t), times clipping. It is always the
        unchanged step's. So if several bases add up to g, their parts add up to the part of g. Without a basis the
        part is that of g.

        Returns:
            (K, 1).
        """

        def part(piece: OptimizerPiece, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
            clips = clip_factors(self._grams[:, 0, 0], self._max_grad_norm).to(gradients[0]).unsqueeze(1)
            yield piece.gradient_factor(clips * gradients[0]) * clips * gradients[-1]

        ((fold_products, _),) = self._products(part, 1, [direction])
        return fold_products

    def _products(
        self,
        deltas_of: Callable[[OptimizerPiece, Sequence[Tensor]], Iterator[Tensor]],
        count: int,
        directions: Sequence[Direction],
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the products of changes of the updates with each direction, as `products` does. Collective.

        Args:
            deltas_of: Yields the changes of the updates, (K + 1, n) each, from a piece and its gradients.
            count: How many it yields.
            directions: The directions X.
        """
        fold_products, corrections = (self._sizes.new_zeros(count, len(self._sizes), len(directions)) for _ in range(2))
        for piece in self._pieces:
            gradients = self._gradients(piece)
            deltas = deltas_of(piece, gradients)
            for c in range(count):
                delta = next(deltas)
                for d, direction in enumerate(directions):
                    x = direction.by_fold.of(piece.bucket, piece.columns)
                    factors = direction.factor * direction.by_fold.factors.to(fold_products)
                    fold_products[c, :, d] += factors * dots(x, delta[:-1])
                    if direction.mean is not None:
                        fold_effect = delta[:-1] - delta[-1]
                        total = direction.factor * self._sizes.sum() * dots(fold_effect, piece.of(direction.mean))
                        corrections[c, :, d] += total - self._sizes * factors * dots(x, fold_effect)
                        del fold_effect
                del delta
            del gradients, deltas  # free them before the next piece's are made
        parts = self._ranks.reduce(torch.stack([fold_products, corrections])).cpu()
        return list(zip(*parts, strict=True))

    def _gradients(self, piece: OptimizerPiece) -> list[Tensor]:
        """Return a piece's gradients before clipping, (K + 1, n) each: the step's, and the basis if there is one."""
        return [torch.cat([term.without(EVERY_FOLD, piece), piece.of(term.mean)[None]]) for term in self._terms]

    def _inner_products(self) -> Tensor:
        """Return the inner products g · g and, with a basis, g · D and D · D, (K + 1, s, s). Collective."""
        count = len(self._terms)
        grams = self._sizes.new_zeros(len(self._sizes) + 1, count, count)
        for piece in self._pieces:
            gradients = self._gradients(piece)
            for i in range(count):
                for j in range(count):
                    grams[:, i, j] += dots(gradients[i], gradients[j])
        return self._ranks.reduce(grams)

    def _updates(self, piece: OptimizerPiece, gradients: Sequence[Tensor], change: Change) -> Tensor:
        """Return a piece's updates with the changed gradients, (K + 1, n)."""
        coefficients = self._grams.new_tensor([1.0 + change.gradient, change.basis][: len(gradients)])
        square = (self._grams @ coefficients @ coefficients).clamp(min=0.0)  # negative only by rounding
        clips = clip_factors(square, self._max_grad_norm if change.max_grad_norm is None else change.max_grad_norm)
        factors = torch.outer(clips, coefficients).to(gradients[0]).unsqueeze(2)
        gradient = factors[:, 0] * gradients[0]
        for index, term in enumerate(gradients[1:], 1):
            gradient.addcmul_(factors[:, index], term)
        state = piece.state.replace(lr=change.lr_factor * piece.state.lr)
        return dataclasses.replace(piece, state=state).total(gradient)
