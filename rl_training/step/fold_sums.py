"""Sums over whole-prompt folds from which every first-order change of the entropy follows.

Each fold k contributes a row: its levels Σρ, ΣρH, ΣρT (number of sequences, their entropies and lengths, weighted by
the importance ratio ρ), and n_k X_k · δθ for every update δθ of interest, with X = ∂H_seq − H_tok ∂E[T] = E[T] ∂H_tok
and, if asked for, X = ∂H_seq. All numbers that are reported are one smooth function, `statistic`, of the sums of these
rows, so one jackknife serves all. It takes the H_tok inside of X as given: to let it vary with the folds would take a
second backward, for bars up to a quarter wider at the first steps of a run and hardly so later (docs/theory.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_training.mathematics.entropy import Estimator
from rl_training.mathematics.folds import leave_fold_out
from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.causes import Splits
from rl_training.step.entropy_gradients import FoldGradients, fold_gradients
from rl_training.step.types import StepContext
from rl_training.step.updates import (
    FIRST_FOLD,
    PREVIOUS,
    WHOLE,
    clipped,
    fill_updates,
    gradient_of_others,
    optimizer_pieces,
    products_by_cause,
    products_with_step,
)

LEVELS = 3  # columns of a row before the products
# The products X·δθ in the order of their columns, a pair each; the splits of `forward` come after them.
PRODUCTS = ("forward", "backward", "reuse", "own_prompts", "forward_unclipped")
FORWARD, BACKWARD, REUSE, OWN_PROMPTS, UNCLIPPED = range(len(PRODUCTS))


def statistic(sums: Tensor) -> Tensor:
    """Returns (..., 1 + products + 1, 2): the entropy, each product and ½(forward + backward), from sums over folds.

    The last dimension is per token, per sequence. ½(forward + backward) of ONE batch is this batch's share of the
    cumulative trapezoid; its error is not that of two independent numbers.
    """
    sequences, entropy, length = sums[..., :LEVELS].unbind(-1)
    number = torch.stack([length, sequences], dim=-1).unsqueeze(-2)  # of tokens, of sequences
    levels = entropy[..., None, None].expand_as(number)
    values = torch.cat([levels, sums[..., LEVELS:].unflatten(-1, (-1, 2))], dim=-2) / number
    half_step = 0.5 * (values[..., 1 + FORWARD, :] + values[..., 1 + BACKWARD, :])
    return torch.cat([values, half_step.unsqueeze(-2)], dim=-2)


def _as_pairs(values: Tensor) -> Tensor:
    """Returns (n, 2) of (n, 1 or 2): nan per sequence where it was not asked for."""
    return nn.functional.pad(values, (0, 2 - values.shape[-1]), value=torch.nan)


class FoldSums:
    """The sums over all folds of all ranks, and those without each fold of this rank, ready for the jackknife.

    total    (LEVELS + 2 products,)          without  (K, …), row l the sums without fold l
    halves   (2, P), ∂H_tok of this rank's even and odd folds, if asked for

    A product is a pair, per token and per sequence; the second is nan unless asked for.
    """

    def __init__(
        self,
        ctx: StepContext,
        ratios: Tensor,
        updates: FlatVectors,
        splits: Splits,
        *,
        estimator: Estimator,
        responses_per_prompt: int,
        per_sequence: bool,
        own_prompts: bool,
        with_halves: bool,
    ) -> None:
        self._ctx, self._updates, self._splits = ctx, updates, splits
        self._responses_per_prompt = responses_per_prompt
        self._sizes = torch.bincount(ctx.fold).double()
        self._unknown = self._sizes.new_full((1 + per_sequence,), torch.nan)
        levels = self._levels(ratios)
        of_fold = torch.cat([torch.ones_like(self._sizes).unsqueeze(1), self._sizes.unsqueeze(1), levels], dim=1)
        num_folds, self._total_size, sequences, entropy, length = ctx.reduce(of_fold.sum(dim=0)).tolist()
        self.num_folds = int(num_folds)
        gradients = fold_gradients(
            ctx,
            updates,
            ratios,
            entropy / length,
            responses_per_prompt,
            estimator,
            per_sequence=per_sequence,
            with_training=own_prompts,
        )
        self._gradient = updates.flatten(ctx.gradients.values())
        self._pieces = optimizer_pieces(ctx.parameters, ctx.optimizer.states)
        clip = fill_updates(ctx, self._pieces, self._gradient, self._sizes, self._total_size, out=updates).tolist()
        rows, shifts = [], []
        self.halves = updates.matrix.new_zeros(2, updates.matrix.shape[1]) if with_halves else None
        for k, fold in enumerate(gradients):
            known = updates.dot(fold.entropy)  # (rows of updates, 1 or 2)
            if self.halves is not None:
                mean_of_half = self._sizes[k] / self._sizes[k % 2 :: 2].sum()
                self.halves[k % 2] += float(mean_of_half * sequences / length) * fold.entropy[0]
            forward, unclipped, split = self._forward(k, fold, clip[1 + k])
            products = [forward, known[PREVIOUS], known[WHOLE], self._own_prompts(k, fold), unclipped]
            by_quantity = self._sizes[k] * torch.cat([torch.stack(products), split])
            rows.append(torch.cat([levels[k], _as_pairs(by_quantity).flatten()]))
            shifts.append(self._sizes[k] * _as_pairs(known[FIRST_FOLD:] - known[WHOLE]))
        by_fold, shift = torch.stack(rows), torch.stack(shifts)
        self.total = ctx.reduce(by_fold.sum(dim=0))
        self.without = self.total - by_fold
        # Without fold l the other folds' steps lose l too: δθ_(−k,−l) − δθ_(−k) ≈ δθ_(−l) − δθ.
        lost = shift.sum(dim=0) - torch.diagonal(shift, dim1=0, dim2=1).T
        self.without[:, LEVELS:].unflatten(1, (-1, 2))[:, [FORWARD, OWN_PROMPTS, UNCLIPPED]] += lost.unsqueeze(1)

    def _levels(self, ratios: Tensor) -> Tensor:
        scores, mask = self._ctx.scores, self._ctx.scores.mask.double()
        entropies = scores.entropies.double().masked_fill(mask == 0, 0.0)
        of_sequence = torch.stack([torch.ones_like(ratios), entropies.sum(dim=1), mask.sum(dim=1)], dim=1)
        levels = ratios.new_zeros(len(self._sizes), LEVELS)
        return levels.index_add_(0, self._ctx.fold, ratios.unsqueeze(1) * of_sequence)

    def _forward(self, k: int, fold: FoldGradients, clip: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns X_k · δθ_(−k), the same without clipping, and the first split by cause, layer and kind."""
        ctx, sizes, splits, nan = self._ctx, self._sizes, self._splits, self._unknown
        if ctx.optimizer.states is None or ctx.fold_gradients is None or float(sizes[k]) >= self._total_size:
            return nan, nan, nan.expand(len(splits.labels), -1)
        row, size = ctx.fold_gradients.matrix[k : k + 1], sizes[k : k + 1].to(self._gradient.device)
        gradient = leave_fold_out(self._gradient, row, size, self._total_size)[0]
        update = self._updates.matrix[FIRST_FOLD + k]
        products = products_by_cause(self._pieces, self._updates, clip * gradient, update, fold.entropy)
        forward = products.sum(dim=(0, 2))
        if clip == 1.0:
            return forward, forward, splits.sum(products)
        unclipped = products_with_step(self._pieces, gradient, fold.entropy)
        return forward, unclipped, splits.sum(products)

    def _own_prompts(self, k: int, fold: FoldGradients) -> Tensor:
        """Returns X_k · δθ_(−c_k), the step without the responses of X_k: the others of these prompts replace them."""
        ctx, chosen_share = self._ctx, self._responses_per_prompt / self._ctx.responses_per_prompt
        unknown = ctx.optimizer.states is None or chosen_share >= 1.0
        if unknown or fold.training is None or ctx.fold_gradients is None:
            return self._unknown
        share = float(self._sizes[k]) / self._total_size
        row = ctx.fold_gradients.matrix[k]
        gradient = gradient_of_others(self._gradient, row, share, fold.training, chosen_share)
        gradient = clipped(gradient, ctx.optimizer.max_grad_norm)
        return products_with_step(self._pieces, gradient, fold.entropy)
