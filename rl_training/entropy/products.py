"""Products of each fold's entropy gradient X_k with the updates that the optimizer would make with and without folds.

    forward             X_k · δθ_(−k)      the update without fold k; by cause and parameter, for the splits
    backward            X_k · δθ_before    the previous step's update
    reuse               X_k · δθ           the step's update
    forward_unclipped   as forward, with updates that are not clipped

X_k is multiplied with all of these as it arrives, bucket by bucket: each pass over its entries takes time. Only
S = Σ n_k X_k is kept, for the leave-one-out corrections. Products are sums over entries: each rank sums its own
entries, and the ranks' sums are added once, at the end.

There is an X per token and, on request, one per sequence. The last dimension of all tables is this denominator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.entropy.attribution import Attribution
from rl_training.entropy.data import (
    BACKWARD,
    DENOMINATORS,
    FORWARD,
    PRODUCTS,
    REUSE,
    SPLITS,
    UNCLIPPED,
    EntropySettings,
)
from rl_training.optim.formula import CAUSES
from rl_training.optim.leave_one_out import LeaveOneOutUpdates, products_without, update_products
from rl_training.optim.updates import OptimizerPiece, StepUpdate
from rl_training.parallel.fold_vectors import Receiver
from rl_training.parallel.fusion import Product
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sums import dots, inner_product
from rl_training.parallel.vectors import Layout, Vector


@dataclass(frozen=True)
class _LeaveOneOutProducts:
    """Products of each X_k with the updates that leave out folds; each rank's own sums, fp64."""

    updates: LeaveOneOutUpdates
    without_fold: Tensor  # X_k · δθ_(−k), (K, causes, parameters, denominators)
    with_update: Tensor  # X_k · δθ, (K, denominators)

    def add(self, piece: OptimizerPiece, folds: int | slice, denominator: int, x: Tensor) -> None:
        """Add the products with a piece.

        Args:
            piece: The piece.
            folds: The folds k.
            denominator: Of X, as an index.
            x: X_k in this piece, (…, n).
        """
        step_update = self.updates.step_update
        entries = None if step_update.vector is None else piece.of(step_update.vector)
        terms = self.updates.clipped.terms_without(folds, piece)
        fusion = self.updates.pieces.layout.fusion
        sums = fusion.sums(_products_of_fold, piece.sizes, piece, x, step_update.clip_tensor, entries, *terms)
        with_update = sums[: -len(CAUSES)]  # by cause, or one number if the update is a vector
        without_fold = sums[-len(CAUSES) :]
        self.without_fold[folds, :, piece.parameter_indices, denominator] += without_fold.movedim(0, -2)
        self.with_update[folds, denominator] += with_update.sum(dim=(0, -1))

    def forward(self) -> Tensor:
        """Return X_k · δθ_(−k), (K, denominators)."""
        return self.without_fold.sum(dim=(1, 2))

    def corrections(self, sizes: Tensor, gradient_sums: Sequence[Vector]) -> tuple[Tensor, Tensor]:
        """Return the leave-one-out corrections of X · δθ, and of its parts by cause.

        A correction is S · (δθ_(−l) − δθ) − n_l X_l · (δθ_(−l) − δθ). Momentum and decay depend on a fold's gradient
        through the preconditioner at most, so their second term is approximated by n_l / N times the first, as if all
        folds contributed alike. The gradient's correction is the remainder.

        Args:
            sizes: n_k, (K,).
            gradient_sums: S for each denominator.

        Returns:
            (K, denominators) and (K, causes, denominators).
        """
        by_cause = torch.zeros_like(self.without_fold[:, :, 0])
        for piece in self.updates.pieces:
            for denominator, total in enumerate(gradient_sums):
                by_cause[..., denominator] += self.updates.difference_products(piece, piece.of(total))
        own_effect = sizes.view(-1, 1) * (self.forward() - self.with_update)
        corrections = by_cause.sum(dim=1) - own_effect
        by_cause *= (1.0 - sizes / sizes.sum()).view(-1, 1, 1)
        gradient = CAUSES.index("gradient")
        by_cause[:, gradient] = 0.0
        by_cause[:, gradient] = corrections - by_cause.sum(dim=1)
        return corrections, by_cause


class FoldProducts:
    """The products of a step, added up as its entropy gradients arrive.

    Args:
        layout: The layout of all vectors.
        sizes: n_k, (K,) fp64.
        attribution: The splits of `forward`.
        step_update: How the update of the step is calculated. None if the optimizer has no formula.
        leave_one_out: The updates without each fold. None if no fold can be left out.
        previous: The previous step's update. None if unknown.
        settings: Whether there is an X per sequence, and whether products with unclipped updates are wanted.
    """

    def __init__(
        self,
        layout: Layout,
        sizes: Tensor,
        attribution: Attribution,
        step_update: StepUpdate | None,
        leave_one_out: LeaveOneOutUpdates | None,
        previous: Vector | None,
        settings: EntropySettings,
    ) -> None:
        self._layout = layout
        self._sizes = sizes
        self._attribution = attribution
        self._step_update = step_update
        self._previous = previous
        self._num_denominators = 1 + settings.per_sequence
        self.gradient_sums: list[Vector] = []  # S for each denominator
        if leave_one_out is not None:
            self.gradient_sums = [layout.zeros() for _ in range(self._num_denominators)]
        self._backward = self._table()
        self._forward = None if leave_one_out is None else self._products(leave_one_out)
        self._reuse = self._table() if self._forward is None else self._forward.with_update
        self._unclipped = None
        if leave_one_out is not None and settings.unclipped:
            is_clipped = leave_one_out.is_clipped
            self._unclipped = self._products(leave_one_out.unclipped()) if is_clipped else self._forward

    def _table(self, *shape: int) -> Tensor:
        """Return zeros, (K, *shape, denominators) fp64."""
        shape = (len(self._sizes), *shape, self._num_denominators)
        return torch.zeros(shape, dtype=torch.float64, device=self._layout.device)

    def _products(self, updates: LeaveOneOutUpdates) -> _LeaveOneOutProducts:
        return _LeaveOneOutProducts(updates, self._table(len(CAUSES), len(self._layout.names)), self._table())

    def receiver(self, denominator: int, folds: range) -> Receiver:
        """Return what multiplies the X_k of these folds, for the denominator of this index."""
        return Receiver(len(folds), functools.partial(self._add, folds, denominator))

    def _add(self, folds: range, denominator: int, bucket: int, first: int, x: Tensor) -> None:
        """Multiply some columns of a bucket of X_k, and add them to S.

        Args:
            folds: The folds k.
            denominator: Of X, as an index.
            bucket: The index of the bucket.
            first: The first column.
            x: (folds, n).
        """
        columns = slice(first, first + x.shape[-1])
        if self.gradient_sums:
            total = self.gradient_sums[denominator][bucket][columns]
            for part, size in zip(x, self._sizes[folds.start : folds.stop].tolist(), strict=True):
                total.add_(part, alpha=size)
        pieces = [] if self._step_update is None else [*self._step_update.pieces.within(bucket, columns)]
        for chosen, part in self._split(folds, x):
            if self._previous is not None:
                previous = self._previous[bucket][columns]
                self._backward[chosen, denominator] += _inner_products(part, previous, self._layout.chunk_size)
            for piece in pieces:
                start = piece.columns.start - first
                self._multiply(piece, chosen, denominator, part[..., start : start + len(piece.param)])

    def _split(self, folds: range, x: Tensor) -> Iterator[tuple[int | slice, Tensor]]:
        """Yield x, (folds, n), in the parts that are multiplied at once, and their folds."""
        if len(folds) == 1 or self._layout.fusion.is_on:  # vectors are multiplied in fewer passes if one by one
            yield from zip(folds, x, strict=True)
        else:
            yield slice(folds.start, folds.stop), x

    def _multiply(self, piece: OptimizerPiece, folds: int | slice, denominator: int, x: Tensor) -> None:
        """Multiply X_k, (…, n), with the updates of a piece."""
        step_update = self._step_update
        assert step_update is not None
        if self._forward is not None:
            self._forward.add(piece, folds, denominator, x)
        else:
            terms = x, piece.of(step_update.mean), step_update.clip_tensor
            products = self._layout.fusion.sums(update_products, piece.sizes, piece, *terms)
            self._reuse[folds, denominator] += products.sum(dim=(0, -1))
        if self._unclipped is not None and self._unclipped is not self._forward:
            self._unclipped.add(piece, folds, denominator, x)

    def sum_over_ranks(self, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """Sum the products over ranks. Collective.

        Returns:
            n_k X_k · δθ, and the leave-one-out corrections Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ) of each fold l. Both are
            (K, products, 2) fp64, per token and per sequence, with the columns PRODUCTS and the SPLITS of `forward`.
            Corrections are 0 except for `forward`, `forward_unclipped` and the parts of `forward` by cause. What is
            not known is nan.
        """
        sizes = self._sizes.to(self._reuse)
        corrections = self._table(len(PRODUCTS) + len(self._attribution.all_labels))
        products = torch.full_like(corrections, torch.nan)
        if self._previous is not None:
            products[:, BACKWARD] = self._backward
        if self._step_update is not None:
            products[:, REUSE] = self._reuse
        if self._forward is not None:
            products[:, FORWARD] = self._forward.forward()
            products[:, SPLITS] = self._attribution.sum_all(self._forward.without_fold)
            corrections[:, FORWARD], by_cause = self._forward.corrections(sizes, self.gradient_sums)
            self._attribution.rows_of_causes(corrections[:, SPLITS]).copy_(by_cause)
        if self._unclipped is not None:
            products[:, UNCLIPPED] = self._unclipped.forward()
            corrections[:, UNCLIPPED], _ = self._unclipped.corrections(sizes, self.gradient_sums)
        parts = _pad_denominators(ranks.reduce(torch.stack([products, corrections])))
        return sizes.view(-1, 1, 1) * parts[0], parts[1]


def _products_of_fold(
    piece: OptimizerPiece, x: Tensor, clip: Tensor | None, entries: Tensor | None, mean: Tensor, *terms: Any
) -> Iterator[Product]:
    """Yield the products of x with the update of the step, and by cause with the one without a fold.

    Args:
        piece, x: As for `_LeaveOneOutProducts.add`.
        clip: The clipping factor of the step.
        entries: The step's update in this piece, if it is kept as a vector.
        mean, *terms: As returned by `FoldMeans.terms_without`.
    """
    yield from update_products(piece, x, mean, clip) if entries is None else [Product(1.0, x, entries)]
    yield from products_without(piece, x, mean, *terms)


def _inner_products(x: Tensor, other: Tensor, chunk_size: int) -> Tensor:
    """Return x · other, (…) fp64, for x (…, n) and other (n,)."""
    product = inner_product if x.dim() == 1 else dots
    parts = zip(x.split(chunk_size, dim=-1), other.split(chunk_size), strict=True)
    return torch.stack([product(part, chunk) for part, chunk in parts]).double().sum(dim=0)


def _pad_denominators(values: Tensor) -> Tensor:
    """Pad (…, 1) per token to (…, 2) with nan per sequence. (…, 2) is returned unchanged."""
    return nn.functional.pad(values, (0, len(DENOMINATORS) - values.shape[-1]), value=torch.nan)
