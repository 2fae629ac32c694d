"""Products of each fold's entropy gradient with the steps that the optimizer would make with and without each fold.

A product is given per direction: X per token and, if asked for, per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rl_training.engine.attribution import Attribution
from rl_training.engine.batch import Batch
from rl_training.engine.entropy_gradients import FoldGradients
from rl_training.engine.fold_moments import Block, FoldMoments
from rl_training.engine.updates import CAUSES, Piece, StepsWithoutFolds
from rl_training.mathematics.vectors import Layout, Vector, add, dot, rows_dot


def as_pairs(values: Tensor) -> Tensor:
    """Returns (…, 2) of (…, 1 or 2): nan per sequence where it was not asked for."""
    return nn.functional.pad(values, (0, 2 - values.shape[-1]), value=torch.nan)


@dataclass
class FoldProducts:
    """Takes the folds of this rank one by one. It holds one entropy gradient at a time, and their sum.

    update    δθ of the step, None without a formula           previous  of the step before, None if not known
    steps     those without a fold, None where none can be left out
    block     what an earlier step has learned from these folds, if it has
    rows      (K, n) of each bucket, where X_k per token of each fold is kept; None: it is not
    """

    layout: Layout
    sizes: Tensor  # (K,) fp64, n_k
    attribution: Attribution
    update: Vector | None
    previous: Vector | None
    steps: StepsWithoutFolds | None
    block: Block | None
    clip: float
    chosen_share: float  # of each prompt's responses that X is taken from
    num_targets: int
    rows: Vector | None
    _sums: list[Vector] = field(default_factory=list)  # by target: S = Σ n_k X_k
    _own: list[Tensor] = field(default_factory=list)  # by fold, (targets,): X_k · (δθ_(−k) − δθ)
    _own_of_last: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sums = [self.layout.zeros() for _ in range(self.num_targets)]

    def add(self, k: int, fold: FoldGradients) -> Tensor:
        """Returns X_k · δθ of PRODUCTS and of forward's splits, (·, targets) fp64."""
        for total, x in zip(self._sums, fold.entropy, strict=True):
            add(total, x, float(self.sizes[k]))
        if self.rows is not None:
            add([part[k] for part in self.rows], fold.entropy[0])
        whole = self._dots(self.update, fold.entropy)
        forward, unclipped, split = self._forward(k, fold.entropy)
        backward = before = self._dots(self.previous, fold.entropy)
        if self.block is not None:
            backward = self._dots(self.block.update_without(k), fold.entropy)
        self._own.append(forward - whole)
        self._own_of_last.append(backward - before if self.block is not None else torch.zeros_like(whole))
        return torch.cat([torch.stack([forward, backward, whole, self._own_prompts(k, fold), unclipped]), split])

    def lost_with_a_fold(self) -> tuple[Tensor, Tensor]:
        """Returns Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ) for each fold l, (K, targets), of this step and of the last one.

        0 of the last one, where it has not learned from these folds.
        """
        own, own_of_last = torch.stack(self._own), torch.stack(self._own_of_last)
        sizes, sums = self.sizes.unsqueeze(1), self._sums
        of_last = torch.zeros_like(own)
        if self.block is not None:
            last = torch.stack([self.block.dots(x) for x in sums], dim=1)
            of_last = last - self._dots(self.previous, sums) - sizes * own_of_last
        if self.steps is None:
            return torch.full_like(own, torch.nan), of_last
        products = own.new_zeros(own.shape)
        for piece, parts in self.steps.parts(slice(None), self.steps.own_clips):
            moved = parts.total
            products += torch.stack([rows_dot(moved, piece.of(x)) for x in sums], dim=1)
        return products - self._dots(self.update, sums) - sizes * own, of_last

    def follow(self, moments: FoldMoments, number: int, batch: Batch, reused: bool) -> None:
        """Advances the moments without each fold by this step."""
        steps = self.steps
        if steps is None:
            return

        def without(folds: slice, piece: Piece) -> Tensor:
            gradient = steps.gradients(folds, piece)
            return gradient.mul_(steps.own_clips[folds].to(gradient).unsqueeze(1))

        whole = [self.clip * part for part in steps.gradient]
        moments.follow(number, batch, reused, steps.pieces, whole, without)

    def _dots(self, update: Vector | None, directions: list[Vector]) -> Tensor:
        """Returns X · δθ of each direction, (targets,) fp64; nan of an update that is not known."""
        if update is None:
            return self.sizes.new_full((len(directions),), torch.nan)
        return torch.stack([dot(update, x) for x in directions])

    def _forward(self, k: int, directions: list[Vector]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns X_k · δθ_(−k), the same without clipping, and the first split by cause, layer and kind."""
        if self.steps is None:
            nan = self._dots(None, directions)
            return nan, nan, nan.expand(len(self.attribution.labels), -1)
        fold, clip = slice(k, k + 1), self.steps.own_clips[k : k + 1]
        products = self.sizes.new_zeros(len(self.layout.names), len(directions), len(CAUSES))
        for piece, parts in self.steps.parts(fold, clip):
            causes = torch.cat([part.expand_as(parts.gradient) for part in parts])  # (3, n)
            for target, x in enumerate(directions):
                values = piece.of(x)
                of_spans = [rows_dot(causes[:, span], values[span]) for _, span in piece.spans]
                products[piece.numbers, target] += torch.stack(of_spans)
        forward = products.sum(dim=(0, 2))
        if float(clip) == 1.0:
            return forward, forward, self.attribution.sum(products)
        unclipped = torch.zeros_like(forward)
        for piece, parts in self.steps.parts(fold, torch.ones_like(clip)):
            unclipped += torch.stack([rows_dot(parts.total[0], piece.of(x)) for x in directions])
        return forward, unclipped, self.attribution.sum(products)

    def _own_prompts(self, k: int, fold: FoldGradients) -> Tensor:
        """Returns X_k · δθ_(−c_k), the step without the responses of X_k: the others of these prompts replace them.

        Its gradient is g + (n_k / N) (g_others − g_k), where g_k = s g_chosen + (1 − s) g_others, s the share of the
        fold's responses that are chosen: every prompt keeps its weight.
        """
        steps, training = self.steps, fold.training
        if steps is None or training is None or self.chosen_share >= 1.0:
            return self._dots(None, fold.entropy)
        factor = float(self.sizes[k]) / steps.total_size * self.chosen_share / (1.0 - self.chosen_share)

        def gradient(folds: slice, piece: Piece) -> Tensor:
            mean = piece.of(steps.gradient)
            row = piece.of(steps.rows)[folds].to(mean.device)
            return mean + factor * (row - piece.of(training))

        one = slice(k, k + 1)
        clip = steps.clips(gradient, one)
        products = self._dots(None, fold.entropy).zero_()
        for piece in steps.pieces:
            step = piece.state.delta(piece.param, float(clip) * gradient(one, piece)[0]).total
            products += torch.stack([rows_dot(step, piece.of(x)) for x in fold.entropy])
        return products
