"""The optimizer's updates without each fold, δθ_(−k), from g_(−k) = (N g − n_k g_k) / (N − n_k).

They are never stored: each piece is calculated when its product with an entropy gradient is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.optim.formula import CAUSES
from rl_training.optim.updates import (
    Entries,
    OptimizerPiece,
    OptimizerPieces,
    ParameterSpan,
    StepUpdate,
    clip_factors,
    scaled,
)
from rl_training.parallel.fold_vectors import EncodedVector, FoldVectors, entries_of
from rl_training.parallel.fusion import Product
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sums import square_norm
from rl_training.statistics.jackknife import leave_out_coefficients

EVERY_FOLD = slice(None)


@dataclass(frozen=True)
class FoldMeans:
    """This rank's entries of a gradient: the mean g over all folds, and the mean g_k over each fold."""

    mean: Entries  # g
    by_fold: FoldVectors  # g_k, up to `by_fold.factors`
    sizes: Tensor  # n_k, (K,) fp64
    mean_coefficient: Tensor  # the factor of g in g_(−k), (K, 1), on the entries' device
    fold_coefficient: Tensor  # the factor of a fold's vector in g_(−k), (K, 1)

    @classmethod
    def of(cls, mean: Entries, by_fold: FoldVectors, sizes: Tensor) -> FoldMeans:
        """Return a gradient by fold, with the factors that leave one fold out.

        Args:
            mean: The mean gradient over all folds.
            by_fold: The mean gradient of each fold.
            sizes: The number of sequences in each fold, (K,).

        Raises:
            ValueError: One fold holds everything.
        """
        entries = next(iter(mean.values() if isinstance(mean, Mapping) else mean))
        of_mean, of_fold = leave_out_coefficients(sizes)
        coefficients = torch.stack([of_mean, of_fold * by_fold.factors.to(of_fold)]).to(entries).unsqueeze(2)
        return cls(mean, by_fold, sizes, *coefficients)

    def without(self, folds: int | slice, piece: ParameterSpan, mean: Tensor | None = None) -> Tensor:
        """Return a piece's entries of g_(−k), (n,) for one fold or (folds, n) for a slice, on the parameters' device.

        Args:
            folds: k, or a slice of folds.
            piece: The piece whose entries are returned.
            mean: g in this piece, if the caller has it already.
        """
        mean = piece.of(self.mean) if mean is None else mean
        of_fold = self.by_fold.of(piece.bucket, piece.columns, folds)
        return _without(mean, of_fold, self.mean_coefficient[folds], self.fold_coefficient[folds])

    def terms_without(
        self, folds: int | slice, piece: ParameterSpan
    ) -> tuple[Tensor, Tensor | EncodedVector, Tensor, Tensor]:
        """Return g, g_k and their two coefficients in g_(−k), of which `_without` makes a piece's entries."""
        column: tuple[int | slice, ...] = (folds, 0) if isinstance(folds, int) else (folds,)
        return (
            piece.of(self.mean),
            self._entries(piece, folds),
            self.mean_coefficient[column],
            self.fold_coefficient[column],
        )

    def entries_by_fold(self, piece: ParameterSpan) -> tuple[Tensor | EncodedVector, ...]:
        """Return each fold's entries of a piece."""
        return tuple(self._entries(piece, fold) for fold in range(len(self.by_fold)))

    def _entries(self, piece: ParameterSpan, folds: int | slice) -> Tensor | EncodedVector:
        if isinstance(folds, int) and self.by_fold.layout.fusion.is_on:
            return self.by_fold.encoded(piece.bucket, piece.columns, folds)
        return self.by_fold.of(piece.bucket, piece.columns, folds)

    def scaled(self, factors: Tensor) -> FoldMeans:
        """Return the same gradients with each g_(−k) multiplied by a factor, (K,)."""
        factors = factors.to(self.mean_coefficient).unsqueeze(1)
        return dataclasses.replace(
            self,
            mean_coefficient=factors * self.mean_coefficient,
            fold_coefficient=factors * self.fold_coefficient,
        )

    def square_norms_without(self, piece: ParameterSpan) -> Tensor:
        """Return |g_(−k)|² in this piece, (K,) fp64.

        They are not taken from products of g and g_k, which would cancel if one fold is nearly all of g.
        """
        mean = piece.of(self.mean)
        fusion = self.by_fold.layout.fusion
        ratios = self.fold_coefficient / self.mean_coefficient
        by_fold = (self._entries(piece, fold) for fold in range(len(self.by_fold)))
        if fusion.is_on:
            numbers = zip(by_fold, ratios[:, 0], strict=True)
            squares = [fusion.sums(_square, (len(mean),), mean, *pair).sum() for pair in numbers]
        else:
            pairs = zip(map(entries_of, by_fold), ratios, strict=True)
            squares = [square_norm(torch.addcmul(mean, *pair)) for pair in pairs]
        return torch.stack(squares) * self.mean_coefficient[:, 0].double().square()


def _without(
    mean: Tensor, of_fold: Tensor | EncodedVector, mean_coefficient: Tensor, fold_coefficient: Tensor
) -> Tensor:
    """Return g_(−k), in two passes."""
    return (entries_of(of_fold) * fold_coefficient).addcmul_(mean_coefficient, mean)


def _square(mean: Tensor, of_fold: Tensor | EncodedVector, ratio: Tensor) -> Iterator[Product]:
    difference = torch.addcmul(mean, entries_of(of_fold), ratio)
    yield Product(1.0, difference, difference)


class LeaveOneOutUpdates:
    """The updates that the optimizer would make without each fold, each clipped by the norm of its own gradient.

    The constructor calculates the clipping factors in one pass over all entries. Collective.

    Args:
        pieces: The parameters and their optimizer state.
        gradient: The gradient by fold, before clipping.
        max_grad_norm: The clipping threshold.
        ranks: The ranks over which entries are spread.
        step_update: That of the step, from all folds. None: it is not clipped.
    """

    def __init__(
        self,
        pieces: OptimizerPieces,
        gradient: FoldMeans,
        max_grad_norm: float,
        ranks: Ranks,
        step_update: StepUpdate | None = None,
    ) -> None:
        self.pieces = pieces
        self.gradient = gradient
        self.max_grad_norm = max_grad_norm
        self.ranks = ranks
        self.step_update = step_update or StepUpdate(pieces, gradient.mean, clip=1.0)
        # The clipping factor of the gradient without each fold, (K,) fp64 in host memory.
        self.clips = torch.ones(len(gradient.sizes), dtype=torch.float64)
        if not math.isinf(max_grad_norm):
            squares = torch.zeros_like(gradient.mean_coefficient[:, 0], dtype=torch.float64)
            for span in pieces.spans:
                squares += gradient.square_norms_without(span)
            self.clips = clip_factors(ranks.reduce(squares).cpu(), max_grad_norm)
        self.clipped = gradient.scaled(self.clips)

    @property
    def is_clipped(self) -> bool:
        """Whether the step's gradient, or that without some fold, is clipped."""
        return self.step_update.clip != 1.0 or bool((self.clips != 1.0).any())

    def unclipped(self) -> LeaveOneOutUpdates:
        """Return the updates that the optimizer would make if nothing were clipped."""
        return LeaveOneOutUpdates(self.pieces, self.gradient, math.inf, self.ranks)

    def difference_products(self, piece: OptimizerPiece, x: Tensor) -> Tensor:
        """Return x · (δθ_(−l) − δθ) in this piece for each fold l, by cause, (K, causes) fp64.

        The difference is linear in that of the gradients where the optimizer's step is smooth, which takes one product
        for each fold, to a relative precision of about 1e-5. Elsewhere each step is calculated again.

        Args:
            piece: The piece.
            x: What the update is multiplied with, (n,).
        """
        fusion = self.pieces.layout.fusion
        gradient = self.clipped
        sizes = (len(x),)
        mean = piece.of(gradient.mean)
        factor = self.step_update.clip_tensor
        if piece.is_smooth:
            by_fold = gradient.entries_by_fold(piece)
            sums = fusion.sums(slope_products, sizes, piece, x, mean, factor, by_fold, is_rough=True)
            sums = sums.view(len(CAUSES), 1 + len(by_fold))
            with_mean = sums[:, :1].T
            with_folds = sums[:, 1:].T
            without = gradient.mean_coefficient * with_mean + gradient.fold_coefficient * with_folds
            return without - self.step_update.clip * with_mean
        with_update = fusion.sums(update_products, sizes, piece, x, mean, factor)
        folds = range(len(self.clips))
        terms = (gradient.terms_without(fold, piece) for fold in folds)
        sums = torch.stack([fusion.sums(products_without, sizes, piece, x, *parts) for parts in terms])
        return (sums - with_update).squeeze(2)


def update_products(piece: OptimizerPiece, x: Tensor, mean: Tensor, factor: Tensor | None) -> Iterable[Product]:
    """Return the products of x with the update of the step, by cause."""
    return piece.products(scaled(mean, factor), x)


def products_without(piece: OptimizerPiece, x: Tensor, *terms: Any) -> Iterable[Product]:
    """Return the products of x with the update without a fold, by cause, given `FoldMeans.terms_without`."""
    return piece.products(_without(*terms), x)


def slope_products(
    piece: OptimizerPiece, x: Tensor, mean: Tensor, factor: Tensor | None, by_fold: Sequence[Tensor | EncodedVector]
) -> Iterator[Product]:
    """Yield the products of the slope of x · δθ with the mean gradient and each fold's, for each cause."""
    for part in piece.state.derivative(piece.param, scaled(mean, factor)):
        slope = x if part is None else x * part
        for vector in (mean, *by_fold):
            yield Product(0.0 if part is None else 1.0, slope, entries_of(vector))
