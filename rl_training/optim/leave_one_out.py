"""The optimizer's updates without each fold, δθ_(−k), from g_(−k) = (N g − n_k g_k) / (N − n_k).

They are never stored: each piece is calculated when its product with an entropy gradient is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.gradients.folds import leave_out_coefficients
from rl_training.optim.formula import UpdateParts
from rl_training.optim.updates import Entries, OptimizerPiece, OptimizerPieces, ParameterSpan, StepUpdate, clipping
from rl_training.parallel.rows import Rows
from rl_training.parallel.vectors import square_norm

EVERY_FOLD = slice(None)


@dataclass(frozen=True)
class FoldMeans:
    """This rank's entries of a gradient: the mean g over all folds, and the mean g_k over each fold."""

    mean: Entries  # g
    rows: Rows  # g_k, up to the factors of the rows
    sizes: Tensor  # n_k, (F,) fp64
    mean_coefficient: Tensor  # the factor of g in g_(−k), (F, 1), on the entries' device
    fold_coefficient: Tensor  # the factor of a row in g_(−k), (F, 1)

    def without(self, folds: int | slice, piece: ParameterSpan, mean: Tensor | None = None) -> Tensor:
        """Return a piece's entries of g_(−k), (n,) for one fold or (folds, n) for a slice, on the parameters' device.

        Args:
            folds: k, or a slice of folds.
            piece: The piece whose entries are returned.
            mean: g in this piece, if the caller has it already.
        """
        mean = piece.of(self.mean) if mean is None else mean
        rows = self.rows.of(piece.bucket, piece.columns, folds)
        return (rows * self.fold_coefficient[folds]).addcmul_(self.mean_coefficient[folds], mean)  # in two passes

    def products_without(self, piece: ParameterSpan, mean: Tensor, vectors: Tensor) -> Tensor:
        """Return the products of g_(−k) with some vectors, (F, vectors) fp64, to a relative precision of about 1e-5.

        Args:
            piece: The piece whose entries are multiplied.
            mean: g in this piece.
            vectors: (vectors, n).
        """
        with_mean = vectors @ mean
        with_rows = torch.stack([vectors @ row for row in self._rows_of(piece)])
        return (self.mean_coefficient * with_mean + self.fold_coefficient * with_rows).double()

    def _rows_of(self, piece: ParameterSpan) -> Iterator[Tensor]:
        """Yield each row's entries of a piece, (n,), one at a time."""
        return (self.rows.of(piece.bucket, piece.columns, fold) for fold in range(len(self.rows)))

    def scaled(self, factors: Tensor) -> FoldMeans:
        """Return the same gradients with each g_(−k) multiplied by a factor, (F,)."""
        factors = factors.to(self.mean_coefficient).unsqueeze(1)
        return dataclasses.replace(
            self,
            mean_coefficient=factors * self.mean_coefficient,
            fold_coefficient=factors * self.fold_coefficient,
        )

    def square_norms_without(self, piece: ParameterSpan) -> Tensor:
        """Return |g_(−k)|² in this piece, (F,) fp64.

        They are not taken from products of g and g_k, which would cancel if one fold is nearly all of g.
        """
        mean = piece.of(self.mean)
        ratios = (self.fold_coefficient / self.mean_coefficient).flatten().tolist()
        rows = zip(self._rows_of(piece), ratios, strict=True)
        squares = [square_norm(torch.add(mean, row, alpha=ratio)) for row, ratio in rows]
        return torch.stack(squares) * self.mean_coefficient[:, 0].double().square()


def fold_means(mean: Entries, rows: Rows, sizes: Tensor, total_size: float | None = None) -> FoldMeans:
    """Return a gradient by fold, with the factors that leave one fold out.

    Args:
        mean: The mean gradient over all folds.
        rows: The mean gradient of each fold.
        sizes: The number of sequences in each fold, (F,).
        total_size: The number of sequences in all folds. None: the sum of `sizes`.

    Raises:
        ValueError: One fold holds everything.
    """
    entries = next(iter(mean.values() if isinstance(mean, Mapping) else mean))
    of_mean, of_fold = leave_out_coefficients(sizes, total_size)
    coefficients = torch.stack([of_mean, of_fold * rows.factors.to(of_fold)]).to(entries).unsqueeze(2)
    return FoldMeans(mean, rows, sizes, *coefficients)


class LeaveOneOutUpdates:
    """The updates that the optimizer would make without each fold, each clipped by the norm of its own gradient.

    The constructor calculates the clipping factors in one pass over all entries. Collective.

    Args:
        pieces: The parameters and their optimizer state.
        gradient: The gradient by fold, before clipping.
        max_grad_norm: The clipping threshold.
        reduce: Sums a tensor over ranks.
        clip: The clipping factor of the gradient over all folds.
    """

    def __init__(
        self,
        pieces: OptimizerPieces,
        gradient: FoldMeans,
        max_grad_norm: float,
        reduce: Callable[[Tensor], Tensor],
        clip: float = 1.0,
    ) -> None:
        self.pieces = pieces
        self.gradient = gradient
        self.max_grad_norm = max_grad_norm
        self.whole = StepUpdate(pieces, gradient.mean, clip)
        # The clipping factor of the gradient without each fold, (F,) fp64 in host memory.
        self.clips = torch.ones(len(gradient.sizes), dtype=torch.float64)
        if not math.isinf(max_grad_norm):
            squares = torch.zeros_like(gradient.mean_coefficient[:, 0], dtype=torch.float64)
            for span in pieces.spans:
                squares += gradient.square_norms_without(span)
            self.clips = clipping(reduce(squares).cpu(), max_grad_norm)
        self.clipped = gradient.scaled(self.clips)

    @property
    def is_clipped(self) -> bool:
        """Whether the step's gradient, or that without some fold, is clipped."""
        return self.whole.clip != 1.0 or bool((self.clips != 1.0).any())

    def unclipped(self) -> LeaveOneOutUpdates:
        """Return the updates that the optimizer would make if nothing were clipped."""
        return LeaveOneOutUpdates(self.pieces, self.gradient, math.inf, torch.clone)

    def changes(self, piece: OptimizerPiece, x: Tensor) -> Tensor:
        """Return how leaving out each fold changes the parts of the update in this piece, times x, (F, causes) fp64.

        It is linear in the change of the gradient where the optimizer's step is smooth, which takes one product for
        each fold. Elsewhere each step is calculated again.

        Args:
            piece: The piece.
            x: What the update is multiplied with, (n,).
        """
        gradient, mean = self.whole.gradient(piece), piece.of(self.gradient.mean)
        derivative = piece.derivative(gradient)
        if derivative is not None:
            slopes = x * torch.stack(derivative)
            return self.clipped.products_without(piece, mean, slopes) - (slopes @ gradient).double()
        whole = piece.effects(gradient, x).sum(dim=-1)
        folds = range(len(self.clips))
        return torch.stack([piece.effects(self.clipped.without(k, piece, mean), x).sum(dim=-1) for k in folds]) - whole

    def parts(self, fold: int) -> Iterator[tuple[OptimizerPiece, UpdateParts]]:
        """Yield each piece with the parts of the update without `fold`."""
        for piece in self.pieces:
            yield piece, piece.delta(self.clipped.without(fold, piece))
