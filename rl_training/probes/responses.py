"""How much each training response moves the entropy: its share of the part of δH forward that is this step's gradient.

The gradient part of δH is linear in the gradient, and the gradient is a sum over responses, g = Σ_j r_j / ranks with
r_j = Σ_k c_jk ∂log π(t_jk) + d_jk ∂h_jk, c and d the loss's derivatives (loss_weights.py). So response j contributes

    x · (a ⊙ r_j) / ranks  =  Σ_k c_jk · (y · ∂log π(t_jk)) / ranks + d_jk · (y · ∂h_jk) / ranks,        y = a ⊙ x,

with x = ∂H_tok and a the optimizer's factor on the gradient, elementwise (AdamW's −lr (1−β1) P / (1−β1^t)). The
derivative along y of all scores at once is a central difference of two forward passes: no backward per response. They
are without autocast and dropout: rounding to bf16 would be larger than the difference.
x is the entropy gradient of the OTHER half of this rank's folds, so that no response is multiplied with itself.

Cost: two forward passes over all responses and two more over those of two folds, which say how long a step the model's
curvature allows; four parameter-size vectors for a moment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.rollout import take_rows
from rl_training.step.types import StepContext
from rl_training.step.updates import clipped, optimizer_pieces

NO_ERROR_BAR = "no error bar: one response's share of the part of forward that is this step's gradient"
# What half of the central difference is to change log-probabilities by, root mean square. Of the shipped model's three
# lowest responses, in fp32, 3e-3 misses 0.2 % at most and 1e-3 no less, by rounding; 3e-2 up to 20 %, by curvature.
CHANGE = 3e-3
LARGEST = 1e-2  # norm of the step that this is extrapolated from, and of any, relative to that of the parameters


def top_responses(
    ctx: StepContext, layout: FlatVectors, entropy_gradients: Tensor, count: int, why_not: str
) -> dict[str, Estimate]:
    """Returns the responses that push entropy down most, delta_h/response/1 first, with their texts as detail."""
    if why_not:
        return {f"delta_h/response/{rank}": Estimate.missing(why_not) for rank in range(1, count + 1)}
    of_response = contributions(ctx, layout, entropy_gradients)
    lowest = of_response.argsort()[:count].tolist()
    return {
        f"delta_h/response/{rank}": Estimate(float(of_response[row]), reason=NO_ERROR_BAR, detail=_describe(ctx, row))
        for rank, row in enumerate(lowest, start=1)
    }


def _describe(ctx: StepContext, row: int) -> dict[str, str | float]:
    rollout = ctx.rollout
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
    response = rollout.completion_ids[row][rollout.token_mask[row].bool()]
    return {
        "prompt": ctx.policy.decode(prompt),
        "response": ctx.policy.decode(response),
        "reward": float(rollout.rewards[row]) if rollout.rewards is not None else math.nan,
        "advantage": float(rollout.advantages[row]),
    }


def contributions(ctx: StepContext, layout: FlatVectors, entropy_gradients: Tensor) -> Tensor:
    """Returns each response's contribution to the change of token entropy, (B,) fp64, nats per token.

    entropy_gradients  (2, P): ∂H_tok of this rank's even and odd folds
    """
    loss = ctx.loss_weights
    total = torch.zeros(ctx.rollout.num_sequences, dtype=torch.float64, device=loss.logps.device)
    for parity in (0, 1):
        direction = _times_optimizer_factor(ctx, layout, entropy_gradients[1 - parity])
        folds = [(ctx.fold == fold).nonzero().squeeze(1) for fold in range(parity, int(ctx.fold.max()) + 1, 2)]
        size = _step_size(ctx, layout, direction, folds[0]) if folds else 0.0
        for rows in folds:
            of_logps, of_entropies = _half_changes(ctx, layout, size * direction, rows) / size
            total[rows] = (loss.logps[rows].double() * of_logps).sum(dim=1) / ctx.num_ranks
            if loss.entropies is not None:
                total[rows] += (loss.entropies[rows].double() * of_entropies).sum(dim=1) / ctx.num_ranks
    return total


def _times_optimizer_factor(ctx: StepContext, layout: FlatVectors, direction: Tensor) -> Tensor:
    """Returns a ⊙ direction, flat: what this step, with its own P and clipping, makes of a small gradient."""
    gradient, clip = clipped(layout.flatten(ctx.gradients.values()), ctx.optimizer.max_grad_norm)
    scaled = []
    for piece in optimizer_pieces(ctx.parameters, ctx.optimizer.states):
        factor = piece.state.gradient_factor(piece.param, gradient[piece.columns].to(piece.param.device))
        scaled.append(factor.to(direction) * direction[piece.columns])
    return clip * torch.cat(scaled)


def _step_size(ctx: StepContext, layout: FlatVectors, direction: Tensor, rows: Tensor) -> float:
    """Returns the factor of `direction` that changes these rows' log-probabilities by CHANGE, or a smaller one."""
    size = LARGEST * float(
        torch.linalg.vector_norm(layout.flatten(p.detach() for p in ctx.parameters.values()))
        / torch.linalg.vector_norm(direction).clamp(min=torch.finfo(direction.dtype).tiny)
    )
    of_logps, _ = _half_changes(ctx, layout, size * direction, rows)
    change = float((of_logps.square().sum() / ctx.rollout.completion_mask[rows].sum()).sqrt())
    return size * min(1.0, CHANGE / change) if change > 0 else size


def _half_changes(ctx: StepContext, layout: FlatVectors, step: Tensor, rows: Tensor) -> Tensor:
    """Returns half of what log-probabilities and entropies change from θ − step to θ + step, (2, rows, T) fp64.

    Zero at padding.
    """
    ends = []
    for sign in (1.0, -1.0):
        pieces = layout.split(sign * step)
        shift = {name: d.view(p.shape).to(p) for (name, p), d in zip(ctx.parameters.items(), pieces, strict=True)}
        with ctx.policy.shifted(shift):
            scores = ctx.policy.score_rollout(take_rows(ctx.rollout, rows))
        both = torch.stack([scores.logps, scores.entropies]).double()
        ends.append(both.masked_fill(scores.mask == 0, 0.0))
    return (ends[0] - ends[1]) / 2.0
