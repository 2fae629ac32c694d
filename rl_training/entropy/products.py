"""Products of each fold's entropy gradient with the updates that the optimizer would make with and without each fold.

Each product is calculated for X per token and, on request, for X per sequence. It is a sum over entries: each rank
sums its own entries, and the ranks' sums are added once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rl_training.entropy.attribution import Attribution
from rl_training.optim.formula import UpdateParts
from rl_training.optim.leave_one_out import LeaveOneOutUpdates
from rl_training.optim.updates import CAUSES, OptimizerPiece, split_products
from rl_training.parallel.vectors import Layout, Vector, add, dot, dots
from rl_training.step.quantities import PRODUCTS


def pad_units(values: Tensor) -> Tensor:
    """Pad (…, 1) per token to (…, 2) with nan per sequence. (…, 2) is returned unchanged."""
    return nn.functional.pad(values, (0, 2 - values.shape[-1]), value=torch.nan)


@dataclass
class FoldProducts:
    """The products of a step, one fold at a time. Only S = Σ n_k X_k is kept of the entropy gradients."""

    layout: Layout
    sizes: Tensor  # (F,) fp64, n_k
    attribution: Attribution
    update: Vector | None  # δθ of the step; None if the optimizer has no formula
    previous: Vector | None  # δθ of the previous step; None if unknown
    leave_one_out: LeaveOneOutUpdates | None  # None if no fold can be left out
    num_targets: int  # 1: per token; 2: per token and per sequence
    sums: list[Vector] = field(default_factory=list)  # S = Σ n_k X_k of each target
    _products: list[Tensor] = field(default_factory=list)  # of each fold, (products and splits, targets)
    # X_k · (δθ_(−k) − δθ) of each fold if nothing were clipped, (targets,); empty if nothing is
    _unclipped_effects: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = [self.layout.zeros() for _ in range(self.num_targets)]

    def add(self, k: int, directions: list[Vector]) -> None:
        """Add fold k with its X_k, a vector for each target."""
        for total, x in zip(self.sums, directions, strict=True):
            add(total, x, float(self.sizes[k]))
        reuse = self._dots(self.update, directions)
        backward = self._dots(self.previous, directions)
        forward, unclipped, split = self._forward(k, directions)
        self._products.append(torch.cat([torch.stack([forward, backward, reuse, unclipped]), split]))

    def sum_over_ranks(self, reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Sum the products over ranks. Collective.

        Returns:
            n_k X_k · δθ for each of PRODUCTS and each split of `forward`, and the leave-one-out corrections
            Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ) of each fold l. Both are (F, products, 2) fp64, per token and per sequence.
            Corrections are 0 except for `forward`, `forward_unclipped` and the parts of `forward` by cause.
        """
        by_fold = torch.stack(self._products)
        products = by_fold[:, : len(PRODUCTS)]
        split = self.attribution.sum(by_fold[:, len(PRODUCTS) :])
        sizes = self.sizes.to(products)
        (forward, _, reuse, _) = products.unbind(dim=1)
        whole, by_cause = self._leave_out_correction(sizes.unsqueeze(1) * (forward - reuse))
        corrections = torch.zeros_like(torch.cat([products, split], dim=1))
        corrections[:, PRODUCTS.index("forward")] = whole
        corrections[:, PRODUCTS.index("forward_unclipped")] = self._unclipped_correction(whole)
        corrections[:, len(PRODUCTS) : len(PRODUCTS) + len(CAUSES)] = by_cause
        parts = pad_units(reduce(torch.stack([torch.cat([products, split], dim=1), corrections])))
        return sizes.view(-1, 1, 1) * parts[0], parts[1]

    def _leave_out_correction(self, own_effect: Tensor) -> tuple[Tensor, Tensor]:
        """Return the leave-one-out corrections of `forward`, (F, targets), and of its parts, (F, causes, targets).

        A correction is S · (δθ_(−l) − δθ) − n_l X_l · (δθ_(−l) − δθ). Momentum and decay depend on a fold's gradient
        through the preconditioner at most, so their second term is approximated by n_l / N times the first, as if all
        folds contributed alike. The gradient's correction is the remainder.

        Args:
            own_effect: n_l X_l · (δθ_(−l) − δθ), (F, targets).
        """
        by_cause = own_effect.new_full((len(own_effect), len(CAUSES), len(self.sums)), torch.nan)
        if self.leave_one_out is None:
            return by_cause[:, 0], by_cause
        by_cause.zero_()
        for piece in self.leave_one_out.pieces:
            xs = [piece.of(x) for x in self.sums]
            products = [dots(change, x) for change in self.leave_one_out.changes(piece) for x in xs]
            by_cause += torch.stack(products).view(len(own_effect), len(xs), -1).transpose(1, 2)
        whole = by_cause.sum(dim=1) - own_effect
        by_cause *= (1.0 - self.sizes / self.sizes.sum()).to(own_effect).view(-1, 1, 1)
        gradient = CAUSES.index("gradient")
        by_cause[:, gradient] = 0.0
        by_cause[:, gradient] = whole - by_cause.sum(dim=1)
        return whole, by_cause

    def _unclipped_correction(self, clipped: Tensor) -> Tensor:
        """Return the leave-one-out corrections of `forward_unclipped`, (F, targets).

        Args:
            clipped: Those of `forward`, which are the same if nothing is clipped.
        """
        if self.leave_one_out is None or not self.leave_one_out.is_clipped:
            return clipped
        correction = torch.zeros_like(clipped)
        for piece in self.leave_one_out.pieces:
            xs = [piece.of(x) for x in self.sums]
            products = [dots(change, x) for change in self.leave_one_out.unclipped_changes(piece) for x in xs]
            correction += torch.stack(products).view_as(correction)
        return correction - self.sizes.to(clipped).unsqueeze(1) * torch.stack(self._unclipped_effects)

    def _dots(self, update: Vector | None, directions: list[Vector]) -> Tensor:
        """Return X · δθ for each X in `directions`, (targets,) fp64; nan if the update is unknown."""
        if update is None:
            return torch.full((len(directions),), torch.nan, dtype=torch.float64, device=self.layout.device)
        return torch.stack([dot(update, x) for x in directions])

    def _forward(self, k: int, directions: list[Vector]) -> tuple[Tensor, Tensor, Tensor]:
        """Return X_k · δθ_(−k), the same without clipping, and the split of the first by cause and by parameter."""
        if self.leave_one_out is None:
            nan = self._dots(None, directions)
            return nan, nan, nan.expand(len(CAUSES) + len(self.layout.names), -1)
        updates = self.leave_one_out
        clip = float(updates.clips[k])
        unclipped, effects = torch.zeros(2, len(directions), dtype=torch.float64, device=self.layout.device)

        # One pass for all of them, because joining parameters takes time.
        def iter_parts() -> Iterator[tuple[OptimizerPiece, UpdateParts]]:
            for piece in updates.pieces:
                mean = piece.of(updates.gradient.mean)
                gradient = updates.gradient.without(k, piece, mean)
                if updates.is_clipped:
                    update = piece.total(gradient)
                    xs = [piece.of(x) for x in directions]
                    unclipped.add_(torch.stack([dots(update, x) for x in xs]))
                    update = update - piece.total(mean)
                    effects.add_(torch.stack([dots(update, x) for x in xs]))
                    gradient.mul_(clip)
                yield piece, piece.delta(gradient)

        products = split_products(iter_parts(), directions, len(self.layout.names))
        forward = products[: len(CAUSES)].sum(dim=0)
        if not updates.is_clipped:
            return forward, forward, products
        self._unclipped_effects.append(effects)
        return forward, unclipped, products
