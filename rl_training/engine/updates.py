"""The parameter change of this optimizer step, and what it would have been without each fold.

The updates are kept as flat vectors, in the rows

    PREVIOUS         δθ of the step before: the change that brought the parameters where they are
    WHOLE            δθ of this step
    FIRST_FOLD + k   δθ_(−k), the step that the other folds alone would have made

each the optimizer's own step from its present state, clipped by its own gradient's norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.mathematics.adamw import AdamWState, clip_coefficient
from rl_training.mathematics.folds import leave_fold_out
from rl_training.mathematics.sgd import SGDState
from rl_training.mathematics.vectors import JOINED, FlatVectors, join
from rl_training.step.types import StepContext

PREVIOUS, WHOLE, FIRST_FOLD = 0, 1, 2
CAUSES = ("momentum", "gradient", "decay")  # the fields of UpdateParts, in their order


@dataclass(frozen=True)
class Piece:
    """Neighbouring parameters that the optimizer treats alike, as one vector."""

    columns: slice  # of a flat vector over all parameters
    param: Tensor  # (n,), before the step
    state: AdamWState | SGDState  # of (n,) tensors


def optimizer_pieces(
    parameters: Mapping[str, Tensor], states: Mapping[str, AdamWState | SGDState] | None
) -> list[Piece]:
    """Returns the parameters and their optimizer's states in pieces that follow one another; none without a formula.

    There may be hundreds of small parameters, and a step calculated for each fold: joined up to JOINED entries, as
    copies, they take few operations. A larger parameter is a piece of its own, and not copied.
    """
    if states is None:
        return []
    together: list[list[str]] = []
    size, before = 0, None
    for name, state in states.items():
        param = parameters[name]
        settings = {key: value for key, value in vars(state).items() if not isinstance(value, Tensor)}
        alike = (type(state), param.dtype, settings)
        if alike != before or size + param.numel() > JOINED:
            together.append([])
            size = 0
        together[-1].append(name)
        size, before = size + param.numel(), alike
    pieces, start = [], 0
    for names in together:
        of_piece = [states[name] for name in names]
        tensors = [key for key, value in vars(of_piece[0]).items() if isinstance(value, Tensor)]
        flat: dict[str, Any] = {key: join(getattr(state, key).reshape(-1) for state in of_piece) for key in tensors}
        vector = join(parameters[name].detach().reshape(-1) for name in names)
        pieces.append(Piece(slice(start, start + len(vector)), vector, dataclasses.replace(of_piece[0], **flat)))
        start += len(vector)
    return pieces


def fill_updates(
    ctx: StepContext,
    pieces: Sequence[Piece],
    gradient: Tensor,
    fold_sizes: Tensor,
    total_size: float,
    out: FlatVectors,
    without: Callable[[slice, Piece], Piece] | None = None,
) -> Tensor:
    """Fills all rows of `out` but PREVIOUS and returns their clip coefficients, (1 + K,), WHOLE first.

    gradient  (P,): the mean over all folds, flat, not clipped
    without   the piece with the moments that never saw these folds, where the optimizer's own have: fold_moments.py

    What cannot be had is nan: all of it where the optimizer's step has no formula, the folds' rows where folds do not
    hold whole prompts or the only fold is the whole batch.
    """
    if ctx.optimizer.states is None:
        out.matrix[WHOLE:] = torch.nan
        return torch.full((out.num_rows - 1,), torch.nan)
    out.matrix[WHOLE] = gradient
    if ctx.fold_gradients is not None and total_size > float(fold_sizes.max()):
        folds = ctx.fold_gradients.matrix
        out.matrix[FIRST_FOLD:] = leave_fold_out(gradient, folds, fold_sizes.to(folds.device), total_size)
    else:
        out.matrix[FIRST_FOLD:] = torch.nan
    clip = clip_coefficient(out.sq_norms()[WHOLE:].sqrt(), ctx.optimizer.max_grad_norm)
    out.matrix[WHOLE:] *= clip.to(out.matrix).unsqueeze(1)
    for piece in pieces:
        parts = [(slice(WHOLE, None), piece)]
        if without is not None:
            parts = [(slice(WHOLE, FIRST_FOLD), piece), (slice(FIRST_FOLD, None), without(slice(None), piece))]
        for which, moved in parts:
            rows = out.matrix[which, piece.columns]
            rows.copy_(moved.state.delta(moved.param, rows.to(moved.param.device)).total)
    return clip


def gradient_of_others(
    gradient: Tensor, fold_gradient: Tensor, share: float, chosen: Tensor, chosen_share: float
) -> Tensor:
    """Returns the whole batch's mean gradient with the chosen responses of a fold replaced by that fold's others.

    g + share · (g_others − g_k), with g_k = chosen_share · g_chosen + (1 − chosen_share) · g_others. Every prompt keeps
    its weight, and the chosen responses have none.

    gradient      (P,), g                                      fold_gradient  (P,), g_k
    share         of the batch that is in the fold             chosen  (P,), mean gradient of the chosen responses
    chosen_share  of the fold's responses that are chosen
    """
    return gradient + (share * chosen_share / (1.0 - chosen_share)) * (fold_gradient - chosen)


def products_with_step(pieces: Sequence[Piece], gradient: Tensor, directions: Tensor) -> Tensor:
    """Returns directions · δθ, (q,) fp64, for the step that this clipped flat gradient would make.

    directions  (q, P)
    """
    products = []
    for piece in pieces:
        x, param = directions[:, piece.columns], piece.param
        step = piece.state.delta(param, gradient[piece.columns].to(param.device)).total
        products.append(x @ step.to(x))
    return torch.stack(products).double().sum(dim=0)


def products_by_cause(
    pieces: Sequence[Piece], layout: FlatVectors, gradient: Tensor, update: Tensor, directions: Tensor
) -> Tensor:
    """Returns directions · δθ, (parameters, q, 3) fp64, by parameter, direction and cause, for one step.

    gradient  (P,), clipped: what the optimizer would be given          update  (P,), the step that it would make of it

    Momentum is what gradient and decay leave of the update.
    """
    parts = update.new_zeros(3, len(update))  # of all causes, of the gradient, of decay
    parts[0] = update
    for piece in pieces:
        param, columns = piece.param, piece.columns
        grad = gradient[columns].to(param.device)
        factor = piece.state.gradient_factor(param, grad)
        parts[1, columns] = (factor * grad).to(parts)
        decay = piece.state.decay_part(param, factor)
        if decay is not None:
            parts[2, columns] = decay.to(parts)
    # Matrix times vector: a product of matrices would be rounded to TF32 where that is switched on.
    products = [
        torch.stack([part @ x for part, x in zip(layout.split(parts), layout.split(direction), strict=True)])
        for direction in directions
    ]
    total, of_gradient, of_decay = torch.stack(products, dim=1).double().unbind(dim=-1)
    return torch.stack([total - of_gradient - of_decay, of_gradient, of_decay], dim=-1)


def clipped(gradient: Tensor, max_grad_norm: float) -> tuple[Tensor, float]:
    """Returns the flat gradient as the trainer's clipping would leave it, and the clip coefficient."""
    clip = clip_coefficient(torch.linalg.vector_norm(gradient, dtype=torch.float64), max_grad_norm)
    return gradient * clip.to(gradient.dtype), float(clip)
