"""The parameter change of this optimizer step, and what it would have been without each fold.

A buffer of updates has the rows

    PREVIOUS         δθ of the step before: the change that brought the parameters where they are
    WHOLE            δθ of this step
    FIRST_FOLD + k   δθ_(−k), the step that the other folds alone would have made

each the optimizer's own step from its present state, clipped by its own gradient's norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.adamw import clip_coefficient
from rl_training.folds import leave_fold_out
from rl_training.gradients import GradientBuffer
from rl_training.types import StepContext

PREVIOUS, WHOLE, FIRST_FOLD = 0, 1, 2
CAUSES = ("momentum", "gradient", "decay")  # the fields of UpdateParts, in their order


def fill_updates(
    ctx: StepContext, gradient: Tensor, fold_sizes: Tensor, total_size: float, out: GradientBuffer
) -> Tensor:
    """Fills all rows of `out` but PREVIOUS and returns their clip coefficients, (1 + K,), WHOLE first.

    gradient  (P,): the mean over all folds, flat, not clipped

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
    for name, state in ctx.optimizer.states.items():
        param, rows = ctx.parameters[name].detach(), out.view(name)[WHOLE:]
        rows.copy_(state.delta(param, rows.to(param.device)).total)
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


def products_with_step(ctx: StepContext, layout: GradientBuffer, gradient: Tensor, directions: Tensor) -> Tensor:
    """Returns directions · δθ, (q,) fp64, for the step that this clipped flat gradient would make.

    directions  (q, P)
    """
    assert ctx.optimizer.states is not None
    step = [
        state.delta(
            ctx.parameters[name].detach(), grad.view(ctx.parameters[name].shape).to(ctx.parameters[name].device)
        )
        for (name, state), grad in zip(ctx.optimizer.states.items(), layout.split(gradient), strict=True)
    ]
    pieces = zip(layout.split(directions), step, strict=True)
    return torch.stack([x @ parts.total.to(x).flatten() for x, parts in pieces]).double().sum(dim=0)


def products_by_cause(
    ctx: StepContext, layout: GradientBuffer, gradient: Tensor, update: Tensor, directions: Tensor
) -> Tensor:
    """Returns directions · δθ, (parameters, q, 3) fp64, by parameter, direction and cause, for one step.

    gradient  (P,), clipped: what the optimizer would be given          update  (P,), the step that it would make of it

    Momentum is what gradient and decay leave of the update. Few operations per parameter: there may be many, and small.
    """
    assert ctx.optimizer.states is not None
    whole, fresh, decay = [], [], []
    pieces = zip(*(layout.split(flat) for flat in (gradient, update, directions)), strict=True)
    for (name, state), (grad, change, x) in zip(ctx.optimizer.states.items(), pieces, strict=True):
        param = ctx.parameters[name].detach()
        grad = grad.view(param.shape).to(param.device)
        factor = state.gradient_factor(param, grad)
        fading = state.decay_part(param, factor)
        whole.append(x @ change)
        fresh.append(x @ (factor * grad).to(x).flatten())
        decay.append(x @ fading.to(x).flatten() if fading is not None else x.new_zeros(len(x)))
    total, of_gradient, of_decay = (torch.stack(products).double() for products in (whole, fresh, decay))
    return torch.stack([total - of_gradient - of_decay, of_gradient, of_decay], dim=-1)


def clipped(gradient: Tensor, max_grad_norm: float) -> Tensor:
    """Returns the flat gradient as the trainer's clipping would leave it."""
    return gradient * clip_coefficient(torch.linalg.vector_norm(gradient, dtype=torch.float64), max_grad_norm).to(
        gradient.dtype
    )
