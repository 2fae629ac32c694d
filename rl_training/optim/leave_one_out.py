"""The optimizer's updates without each fold, δθ_(−k), from g_(−k) = (N g − n_k g_k) / (N − n_k).

They are never stored: each piece is calculated when its product with an entropy gradient is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.gradients.folds import leave_out_coefficients
from rl_training.optim.formula import UpdateParts
from rl_training.optim.updates import Entries, OptimizerPiece, OptimizerPieces, clipping
from rl_training.parallel.vectors import Vector

EVERY_FOLD = slice(None)


@dataclass(frozen=True)
class FoldMeans:
    """This rank's entries of a gradient: the mean g over all folds, and the mean g_k over each fold."""

    mean: Entries  # g
    rows: Vector  # g_k, (F, n) per bucket, perhaps in host memory or in bf16
    sizes: Tensor  # n_k, (F,) fp64
    mean_coefficient: Tensor  # the factor of g in g_(−k), (F, 1), on the entries' device
    fold_coefficient: Tensor  # the factor of g_k in g_(−k), (F, 1)

    def without(self, folds: int | slice, piece: OptimizerPiece, mean: Tensor | None = None) -> Tensor:
        """Return a piece's entries of g_(−k), (n,) for one fold or (folds, n) for a slice, on the parameters' device.

        Args:
            folds: k, or a slice of folds.
            piece: The piece whose entries are returned.
            mean: g in this piece, if the caller has it already.
        """
        mean = piece.of(self.mean) if mean is None else mean
        rows = piece.of(self.rows)[folds].to(mean)
        return (rows * self.fold_coefficient[folds]).addcmul_(self.mean_coefficient[folds], mean)  # in two passes


def fold_means(mean: Entries, rows: Vector, sizes: Tensor, total_size: float | None = None) -> FoldMeans:
    """Return a gradient by fold, with the factors that leave one fold out.

    Args:
        mean: The mean gradient over all folds.
        rows: The mean gradient of each fold, (F, n) per bucket.
        sizes: The number of sequences in each fold, (F,).
        total_size: The number of sequences in all folds. None: the sum of `sizes`.

    Raises:
        ValueError: One fold holds everything.
    """
    entries = next(iter(mean.values() if isinstance(mean, Mapping) else mean))
    coefficients = torch.stack(leave_out_coefficients(sizes, total_size)).to(entries).unsqueeze(2)
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
        self.clip = clip
        squares = torch.zeros_like(gradient.mean_coefficient[:, 0], dtype=torch.float64)
        for piece in pieces:
            # Norms are not taken from products of g and g_k, which would cancel if one fold is nearly all of g.
            squares += gradient.without(EVERY_FOLD, piece).square_().sum(dim=-1).double()
        # The clipping factor of the gradient without each fold, (F,) fp64 in host memory.
        self.clips = clipping(reduce(squares).cpu(), max_grad_norm)

    def changes(self, piece: OptimizerPiece) -> Iterator[Tensor]:
        """Yield for each fold how leaving it out changes the parts of the update in this piece, (causes, n)."""
        mean = piece.of(self.gradient.mean)
        whole = torch.stack(piece.delta(self.clip * mean))
        for fold, clip in enumerate(self.clips.tolist()):
            yield torch.stack(piece.delta(self.gradient.without(fold, piece, mean).mul_(clip))).sub_(whole)

    @property
    def is_clipped(self) -> bool:
        """Whether the step's gradient, or that without some fold, is clipped."""
        return self.clip != 1.0 or bool((self.clips != 1.0).any())

    def unclipped_changes(self, piece: OptimizerPiece) -> Iterator[Tensor]:
        """Yield for each fold how leaving it out would change the update in this piece without clipping, (n,)."""
        mean = piece.of(self.gradient.mean)
        whole = piece.total(mean)
        for fold in range(len(self.clips)):
            yield piece.total(self.gradient.without(fold, piece, mean)) - whole

    def parts(self, fold: int) -> Iterator[tuple[OptimizerPiece, UpdateParts]]:
        """Yield each piece with the parts of the update without `fold`."""
        for piece in self.pieces:
            yield piece, piece.delta(self.gradient.without(fold, piece).mul_(float(self.clips[fold])))
