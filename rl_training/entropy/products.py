"""Products of each fold's entropy gradient with the updates that the optimizer would make with and without each fold.

An entropy gradient X_k is multiplied as it arrives, bucket by bucket, with everything that it is multiplied with at
all: each pass over its entries takes time. Only S = Σ n_k X_k is kept. Products are sums over entries: each rank sums
its own entries, and the ranks' sums are added once, at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.entropy.attribution import Attribution
from rl_training.entropy.data import BACKWARD, FORWARD, PRODUCTS, REUSE, SPLITS, UNCLIPPED, EntropySettings
from rl_training.optim.formula import CAUSES
from rl_training.optim.leave_one_out import LeaveOneOutUpdates, products_without, update_products
from rl_training.optim.updates import OptimizerPiece, StepUpdate
from rl_training.parallel.fold_vectors import Receiver
from rl_training.parallel.fusion import Product
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sums import dots, inner_product
from rl_training.parallel.vectors import Layout, Vector


def pad_per_sequence(values: Tensor) -> Tensor:
    """Pad (…, 1) per token to (…, 2) with nan per sequence. (…, 2) is returned unchanged."""
    return nn.functional.pad(values, (0, 2 - values.shape[-1]), value=torch.nan)


@dataclass(frozen=True)
class _LeaveOneOutProducts:
    """Products of each X_k with the updates that leave out folds; each rank's own sums, fp64."""

    updates: LeaveOneOutUpdates
    without: Tensor  # X_k · δθ_(−k), (K, causes, parameters, targets)
    whole: Tensor  # X_k · δθ, (K, targets)

    def add(self, piece: OptimizerPiece, index: int | slice, target: int, x: Tensor) -> None:
        """Add the products with a piece.

        Args:
            piece: The piece.
            index: The folds k.
            target: The index of X's target.
            x: X_k in this piece, (…, n).
        """
        updates = self.updates
        held = None if updates.whole.held is None else piece.of(updates.whole.held)
        terms = updates.clipped.terms_without(index, piece)
        fusion = updates.pieces.layout.fusion
        sums = fusion.sums(_products_of_fold, piece.sizes, piece, x, updates.whole.clip_tensor, held, *terms)
        whole = sums[: -len(CAUSES)]
        without = sums[-len(CAUSES) :]
        self.without[index, :, piece.parameter_indices, target] += without.movedim(0, -2)
        self.whole[index, target] += whole.sum(dim=(0, -1))

    def corrections(self, sizes: Tensor, sums: Sequence[Vector]) -> tuple[Tensor, Tensor]:
        """Return the leave-one-out corrections of X · δθ, (K, targets), and of its parts, (K, causes, targets).

        A correction is S · (δθ_(−l) − δθ) − n_l X_l · (δθ_(−l) − δθ). Momentum and decay depend on a fold's gradient
        through the preconditioner at most, so their second term is approximated by n_l / N times the first, as if all
        folds contributed alike. The gradient's correction is the remainder.

        Args:
            sizes: n_k, (K,).
            sums: S of each target.
        """
        by_cause = torch.zeros_like(self.without[:, :, 0])
        for piece in self.updates.pieces:
            for target, total in enumerate(sums):
                by_cause[..., target] += self.updates.changes(piece, piece.of(total))
        own_effect = sizes.view(-1, 1) * (self.without.sum(dim=(1, 2)) - self.whole)
        whole = by_cause.sum(dim=1) - own_effect
        by_cause *= (1.0 - sizes / sizes.sum()).view(-1, 1, 1)
        gradient = CAUSES.index("gradient")
        by_cause[:, gradient] = 0.0
        by_cause[:, gradient] = whole - by_cause.sum(dim=1)
        return whole, by_cause


class FoldProducts:
    """The products of a step: of X per token and, on request, of X per sequence ("targets").

    Args:
        layout: The layout of all vectors.
        sizes: n_k, (K,) fp64.
        attribution: The splits of `forward`.
        update: The update of the step. None if the optimizer has no formula.
        leave_one_out: The updates without each fold. None if no fold can be left out.
        previous: δθ of the previous step. None if unknown.
        settings: Which targets there are, and whether the updates without clipping are wanted.
    """

    def __init__(
        self,
        layout: Layout,
        sizes: Tensor,
        attribution: Attribution,
        update: StepUpdate | None,
        leave_one_out: LeaveOneOutUpdates | None,
        previous: Vector | None,
        settings: EntropySettings,
    ) -> None:
        self._layout = layout
        self._attribution = attribution
        self._update = update
        self._previous = previous
        self._sizes = sizes
        self._num_targets = 1 + settings.per_sequence
        self.sums = [layout.zeros() for _ in range(self._num_targets)] if leave_one_out is not None else []  # S
        self._backward = self._table()  # X_k · δθ of the previous step
        self._forward = None if leave_one_out is None else self._products(leave_one_out)
        self._whole = self._table() if self._forward is None else self._forward.whole  # X_k · δθ
        self._unclipped = None
        if leave_one_out is not None and settings.unclipped:
            is_clipped = leave_one_out.is_clipped
            self._unclipped = self._products(leave_one_out.unclipped()) if is_clipped else self._forward

    def _table(self, *shape: int) -> Tensor:
        """Return zeros, (K, *shape, targets) fp64."""
        return torch.zeros(len(self._sizes), *shape, self._num_targets, dtype=torch.float64, device=self._layout.device)

    def _products(self, updates: LeaveOneOutUpdates) -> _LeaveOneOutProducts:
        return _LeaveOneOutProducts(updates, self._table(len(CAUSES), len(self._layout.names)), self._table())

    def receiver(self, target: int, folds: range) -> Receiver:
        """Return what multiplies the X_k of these folds: 0: per token; 1: per sequence."""
        return Receiver(len(folds), functools.partial(self._add, folds, target))

    def _add(self, folds: range, target: int, bucket: int, first: int, x: Tensor) -> None:
        """Multiply some columns of a bucket of X_k, and add them to S.

        Args:
            folds: The folds k.
            target: The index of X's target.
            bucket: The index of the bucket.
            first: The first column.
            x: (folds, n).
        """
        columns = slice(first, first + x.shape[-1])
        if self.sums:
            total = self.sums[target][bucket][columns]
            for part, size in zip(x, self._sizes[folds.start : folds.stop].tolist(), strict=True):
                total.add_(part, alpha=size)
        pieces = [] if self._update is None else [*self._update.pieces.within(bucket, columns)]
        for index, part in self._split(folds, x):
            if self._previous is not None:
                previous = self._previous[bucket][columns]
                self._backward[index, target] += _inner_products(part, previous, self._layout.chunk_size)
            for piece in pieces:
                start = piece.columns.start - first
                self._multiply(piece, index, target, part[..., start : start + len(piece.param)])

    def _split(self, folds: range, x: Tensor) -> Iterator[tuple[int | slice, Tensor]]:
        """Yield x, (folds, n), in the parts that are multiplied at once, and their folds."""
        if len(folds) == 1 or self._layout.fusion.is_on:  # vectors are multiplied in fewer passes if one by one
            yield from zip(folds, x, strict=True)
        else:
            yield slice(folds.start, folds.stop), x

    def _multiply(self, piece: OptimizerPiece, index: int | slice, target: int, x: Tensor) -> None:
        """Multiply X_k, (…, n), with the updates of a piece."""
        update = self._update
        assert update is not None
        if self._forward is not None:
            self._forward.add(piece, index, target, x)
        else:
            terms = x, piece.of(update.mean), update.clip_tensor
            self._whole[index, target] += self._layout.fusion.sums(update_products, piece.sizes, piece, *terms).sum(
                dim=(0, -1)
            )
        if self._unclipped is not None and self._unclipped is not self._forward:
            self._unclipped.add(piece, index, target, x)

    def sum_over_ranks(self, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """Sum the products over ranks. Collective.

        Returns:
            n_k X_k · δθ, and the leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ) of each fold l. Both are
            (K, products, 2) fp64, per token and per sequence, with the columns PRODUCTS and the SPLITS of `forward`.
            Corrections are 0 except for `forward`, `forward_unclipped` and the parts of `forward` by cause. What is
            not known is nan.
        """
        sizes = self._sizes.to(self._whole)
        corrections = self._table(len(PRODUCTS) + len(self._attribution.all_labels))
        products = torch.full_like(corrections, torch.nan)
        if self._previous is not None:
            products[:, BACKWARD] = self._backward
        if self._update is not None:
            products[:, REUSE] = self._whole
        for index, part in ((FORWARD, self._forward), (UNCLIPPED, self._unclipped)):
            if part is not None:
                products[:, index] = part.without.sum(dim=(1, 2))
                corrections[:, index], by_cause = part.corrections(sizes, self.sums)
                if index == FORWARD:
                    products[:, SPLITS] = self._attribution.sum_all(part.without)
                    self._attribution.rows_of_causes(corrections[:, SPLITS]).copy_(by_cause)
        parts = pad_per_sequence(ranks.reduce(torch.stack([products, corrections])))
        return sizes.view(-1, 1, 1) * parts[0], parts[1]


def _products_of_fold(
    piece: OptimizerPiece, x: Tensor, factor: Tensor | None, held: Tensor | None, mean: Tensor, *terms: Any
) -> Iterator[Product]:
    """Yield the products of x with the update of the step, and by cause with the one without a fold.

    Args:
        piece, x: As for `_LeaveOneOutProducts.add`.
        factor: The clipping factor of the step.
        held: The step's update in this piece, if it is held.
        mean, *terms: As returned by `FoldMeans.terms_without`.
    """
    yield from update_products(piece, x, mean, factor) if held is None else [Product(1.0, x, held)]
    yield from products_without(piece, x, mean, *terms)


def _inner_products(x: Tensor, other: Tensor, chunk_size: int) -> Tensor:
    """Return x · other, (…) fp64, for x (…, n) and other (n,)."""
    product = inner_product if x.dim() == 1 else dots
    parts = zip(x.split(chunk_size, dim=-1), other.split(chunk_size), strict=True)
    return torch.stack([product(part, chunk) for part, chunk in parts]).double().sum(dim=0)
