"""Sums over whole-prompt folds from which every first-order change of the entropy follows.

Each fold k contributes a row: its levels Σρ, ΣρH, ΣρT (number of sequences, their entropies and lengths, weighted by
the importance ratio ρ), and n_k X_k · δθ for every update δθ of interest, with X = ∂H_seq − H_tok ∂E[T] = E[T] ∂H_tok
and, if asked for, X = ∂H_seq. All numbers that are reported are one smooth function, `statistic`, of the sums of these
rows, so one jackknife serves all. Where the second is asked for, the sums without a fold have the H_tok of the other
folds in them. Where it is not, H_tok is taken as given, and bars per token are some percent too small (docs/theory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_training.mathematics.entropy import Estimator
from rl_training.mathematics.folds import leave_fold_out
from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.attribution import Attribution
from rl_training.step.entropy_gradients import Choice, FoldGradients, fold_gradients
from rl_training.step.fold_moments import Block, FoldMoments
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


@dataclass(frozen=True)
class FoldSums:
    """The sums over all folds of all ranks, and those without each fold of this rank, ready for the jackknife.

    A product is a pair, per token and per sequence; the second is nan unless asked for.
    """

    total: Tensor  # (LEVELS + 2 products,)
    without: Tensor  # (K, LEVELS + 2 products), row l the sums without fold l
    num_folds: int  # of all ranks
    left_out: bool  # whether the steps without a fold never saw it: not where one learned from it unmeasured
    halves: Tensor | None  # (2, P), ∂H_tok of this rank's even and odd folds, if asked for


def sum_over_folds(
    ctx: StepContext,
    ratios: Tensor,
    updates: FlatVectors,
    splits: Attribution,
    moments: FoldMoments,
    *,
    estimator: Estimator,
    choice: Choice,
    per_sequence: bool,
    own_prompts: bool,
    with_halves: bool,
) -> FoldSums:
    """Returns the step's sums; fills `updates` but for its row PREVIOUS, and takes `moments` along."""
    sizes = torch.bincount(ctx.fold).double()
    levels = levels_of_folds(ctx, ratios)
    of_fold = torch.cat([torch.ones_like(sizes).unsqueeze(1), sizes.unsqueeze(1), levels], dim=1)
    num_folds, total_size, sequences, entropy, length = ctx.reduce(of_fold.sum(dim=0)).tolist()
    steps = _Steps(ctx, updates, splits, moments.before(ctx), sizes, total_size, choice)
    gradients = fold_gradients(
        ctx,
        updates,
        ratios,
        entropy / length,
        choice,
        estimator,
        per_sequence=per_sequence,
        with_training=own_prompts,
    )
    rows, shifts = [], []
    halves = updates.matrix.new_zeros(2, updates.matrix.shape[1]) if with_halves else None
    for k, fold in enumerate(gradients):
        if halves is not None:
            mean_of_half = sizes[k] / sizes[k % 2 :: 2].sum()
            halves[k % 2] += float(mean_of_half * sequences / length) * fold.entropy[0]
        products, shift = steps.products(k, fold)
        rows.append(torch.cat([levels[k], _as_pairs(sizes[k] * products).flatten()]))
        shifts.append(_as_pairs((sizes[k] * shift).flatten(0, 1)).unflatten(0, shift.shape[:2]))
    if ctx.learned_again:
        steps.follow(moments)
    by_fold, shift = torch.stack(rows), torch.stack(shifts)  # (k, columns); (k, l, this step and the last, 2)
    total = ctx.reduce(by_fold.sum(dim=0))
    level = entropy / length if per_sequence and entropy > 0 else None  # without any entropy none to vary
    without = sums_without(total, by_fold, shift, level)
    return FoldSums(total, without, int(num_folds), steps.left_out, halves)


def sums_without(total: Tensor, by_fold: Tensor, shift: Tensor, level: float | None) -> Tensor:
    """Returns (K, columns), row l the sums without fold l.

    total    (columns,), over all folds of all ranks
    by_fold  (K, columns), what each fold of this rank adds
    shift    (k, l, this step and the last, 2): n_k X_k · (δθ_(−l) − δθ), for each fold k
    level    the H_tok inside of X: row l is put to that of the other folds; None: it is taken as given
    """
    without = total - by_fold
    # Without fold l the other folds' steps lose l too: δθ_(−k,−l) − δθ_(−k) ≈ δθ_(−l) − δθ.
    lost = shift.sum(dim=0) - torch.diagonal(shift, dim1=0, dim2=1).movedim(-1, 0)
    pairs = without[:, LEVELS:].unflatten(1, (-1, 2))
    pairs[:, [FORWARD, OWN_PROMPTS, UNCLIPPED]] += lost[:, :1]
    pairs[:, BACKWARD] += lost[:, 1]
    if level is not None:  # ∂E[T] is what ∂H_seq and ∂H_seq − H_tok ∂E[T] differ by, over H_tok
        token, sequence = pairs.unbind(-1)
        token += (1.0 - without[:, 1:2] / without[:, 2:3] / level) * (sequence - token)
    return without


def levels_of_folds(ctx: StepContext, ratios: Tensor) -> Tensor:
    """Returns (K, LEVELS): Σρ, ΣρH and ΣρT of each fold of this rank."""
    mask = ctx.scores.mask.double()
    entropies = ctx.scores.entropies.double().masked_fill(mask == 0, 0.0)
    of_sequence = torch.stack([torch.ones_like(ratios), entropies.sum(dim=1), mask.sum(dim=1)], dim=1)
    levels = ratios.new_zeros(int(ctx.fold.max()) + 1, LEVELS)
    return levels.index_add_(0, ctx.fold, ratios.unsqueeze(1) * of_sequence)


class _Steps:
    """The steps that the optimizer would make with and without each fold, and the products of a gradient with them."""

    def __init__(
        self,
        ctx: StepContext,
        updates: FlatVectors,
        splits: Attribution,
        learned: Block | None,
        sizes: Tensor,
        total_size: float,
        choice: Choice,
    ) -> None:
        self._ctx, self._updates, self._splits, self._learned = ctx, updates, splits, learned
        self._sizes, self._total_size = sizes, total_size
        self._choice = choice
        self._gradient = updates.flatten(ctx.gradients.values())
        self._pieces = optimizer_pieces(ctx.parameters, ctx.optimizer.states)
        without = learned.without if learned is not None else None
        self._clip = fill_updates(ctx, self._pieces, self._gradient, sizes, total_size, updates, without).tolist()

    @property
    def left_out(self) -> bool:
        """Whether δθ_(−k) never saw fold k."""
        return self._learned is not None or not self._ctx.reused

    def products(self, k: int, fold: FoldGradients) -> tuple[Tensor, Tensor]:
        """Returns X_k · δθ of PRODUCTS and of forward's splits, (·, 1 or 2), and X_k · (δθ_(−l) − δθ), (K, 2, 1 or 2).

        The latter of this step and of the last one, which is 0 where the last one did not learn from these folds.
        """
        known = self._updates.dot(fold.entropy)  # (rows of updates, 1 or 2)
        shift = known[FIRST_FOLD:] - known[WHOLE]
        backward, shift_of_last = known[PREVIOUS], torch.zeros_like(shift)
        if self._learned is not None:
            last = self._learned.updates.dot(fold.entropy)
            backward, shift_of_last = last[k], last - known[PREVIOUS]
        forward, unclipped, split = self._forward(k, fold)
        products = [forward, backward, known[WHOLE], self._own_prompts(k, fold), unclipped]
        return torch.cat([torch.stack(products), split]), torch.stack([shift, shift_of_last], dim=1)

    def follow(self, moments: FoldMoments) -> None:
        """Takes the moments without each fold through this step, if there is such a step."""
        if self._ctx.optimizer.states is not None and self._can_leave_out(self._sizes.max()):
            clipped_gradient = self._clip[0] * self._gradient
            moments.follow(self._ctx, self._pieces, clipped_gradient, lambda k: self._clip[1 + k] * self._without(k))

    def _forward(self, k: int, fold: FoldGradients) -> tuple[Tensor, Tensor, Tensor]:
        """Returns X_k · δθ_(−k), the same without clipping, and the first split by cause, layer and kind."""
        splits = self._splits
        if self._ctx.optimizer.states is None or not self._can_leave_out(self._sizes[k]):
            nan = self._unknown(fold)
            return nan, nan, nan.expand(len(splits.labels), -1)
        gradient = self._without(k)
        clip, update = self._clip[1 + k], self._updates.matrix[FIRST_FOLD + k]
        home = self._updates.home  # the rows may lie in host memory, the sums do not
        pieces = self._pieces
        if self._learned is not None:
            pieces = [self._learned.without(k, piece) for piece in pieces]
        products = products_by_cause(pieces, self._updates, clip * gradient, update, fold.entropy).to(home)
        forward = products.sum(dim=(0, 2))
        if clip == 1.0:
            return forward, forward, splits.sum(products)
        unclipped = products_with_step(pieces, gradient, fold.entropy).to(home)
        return forward, unclipped, splits.sum(products)

    def _can_leave_out(self, size: Tensor) -> bool:
        """Returns whether a fold of so many sequences can be left out of the gradient."""
        return self._ctx.fold_gradients is not None and float(size) < self._total_size

    def _without(self, k: int) -> Tensor:
        """Returns the mean gradient of the other folds, (P,), not clipped."""
        assert self._ctx.fold_gradients is not None
        row, size = self._ctx.fold_gradients.matrix[k : k + 1], self._sizes[k : k + 1].to(self._gradient.device)
        return leave_fold_out(self._gradient, row, size, self._total_size)[0]

    def _own_prompts(self, k: int, fold: FoldGradients) -> Tensor:
        """Returns X_k · δθ_(−c_k), the step without the responses of X_k: the others of these prompts replace them."""
        ctx, chosen_share = self._ctx, self._choice.responses_per_prompt / self._ctx.responses_per_prompt
        unknown = ctx.optimizer.states is None or chosen_share >= 1.0 or self._choice.prompt_share < 1.0
        if unknown or fold.training is None or ctx.fold_gradients is None:
            return self._unknown(fold)
        share = float(self._sizes[k]) / self._total_size
        row = ctx.fold_gradients.matrix[k]
        gradient = gradient_of_others(self._gradient, row, share, fold.training, chosen_share)
        gradient = clipped(gradient, ctx.optimizer.max_grad_norm)[0]
        return products_with_step(self._pieces, gradient, fold.entropy).to(self._updates.home)

    def _unknown(self, fold: FoldGradients) -> Tensor:
        return self._sizes.new_full((len(fold.entropy),), torch.nan)
