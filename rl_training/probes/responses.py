"""The responses probe: how much of the gradient's part of δH forward comes from each training response.

That part is linear in the gradient, and the gradient is a sum over responses, g = Σ_j r_j / ranks with
r_j = Σ_k c_jk ∂log π(t_jk) + d_jk ∂h_jk, c and d the loss's derivatives (loss_weights.py). So response j contributes

    x · (a ⊙ r_j) / ranks  =  Σ_k c_jk · (y · ∂log π(t_jk)) / ranks + d_jk · (y · ∂h_jk) / ranks,        y = a ⊙ x,

with x = ∂H_tok and a the optimizer's factor on the gradient, elementwise (AdamW's −lr (1−β1) P / (1−β1^t)). The
derivative along y of all scores at once is a central difference of two forward passes: no backward per response. They
run without autocast and dropout: rounding to bf16 would be larger than the difference.
x is the entropy gradient of the OTHER half of this rank's folds, so that no response is multiplied with itself. Two
further forward passes over the responses of two folds say how long a step the model's curvature allows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.engine.batch import take_rows
from rl_training.engine.entropy_change import EntropyChange
from rl_training.engine.probe import Need, Probe
from rl_training.engine.step import Step
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.vectors import Vector, dot

NO_ERROR_BAR = "no error bar: one response's share of the part of forward that is this step's gradient"
# What half of the central difference is to change log-probabilities by, root mean square. Of the shipped model's three
# lowest responses, in fp32, 3e-3 misses 0.2 % at most and 1e-3 no less, by rounding; 3e-2 up to 20 %, by curvature.
CHANGE = 3e-3
LARGEST = 1e-2  # norm of the step that this is extrapolated from, and of any, relative to that of the parameters


class ResponsesProbe(Probe):
    """Names the responses of the main process that push entropy down most in each step, `delta_h/response/1`, …

    Prompt, response, reward and advantage are in probes.jsonl.

    count  how many
    every  measure each `every`-th step
    """

    name = "responses"
    needs = Need.ENTROPY_ROWS

    def __init__(self, count: int = 3, every: int = 1) -> None:
        super().__init__(every)
        if count < 1:
            raise ValueError(f"responses: count={count} must be at least 1")
        self.count = count

    def prepare(self, step: Step) -> None:
        names = [f"delta_h/response/{rank}" for rank in range(1, self.count + 1)]
        reason = step.entropy_change.why_none or step.capabilities.why_no_responses(step.batch.num_folds)
        if reason:
            self._answers = dict.fromkeys(names, Estimate.missing(reason))
            return
        of_response = contributions(step)
        lowest = of_response.argsort()[: self.count].tolist()
        few = f"the step has {len(lowest)} responses on this process"
        self._answers = dict.fromkeys(names, Estimate.missing(few)) | {
            name: Estimate(float(of_response[row]), reason=NO_ERROR_BAR, detail=_describe(step, row))
            for name, row in zip(names, lowest, strict=False)
        }


def contributions(step: Step) -> Tensor:
    """Returns each response's contribution to the change of token entropy, (B,) fp64, nats per token."""
    batch, loss, change = step.batch, step.batch.loss_weights, step.entropy_change
    total = torch.zeros(batch.rollout.num_sequences, dtype=torch.float64, device=loss.logps.device)
    for parity in (0, 1):
        direction = _times_optimizer_factor(change, change.gradient_of(slice(1 - parity, None, 2)))
        folds = [(batch.fold == fold).nonzero().squeeze(1) for fold in range(parity, batch.num_folds, 2)]
        size = _step_size(step, direction, folds[0]) if folds else 0.0
        for rows in folds:
            of_logps, of_entropies = _half_changes(step, direction, size, rows) / size
            total[rows] = (loss.logps[rows].double() * of_logps).sum(dim=1) / step.ranks.count
            if loss.entropies is not None:
                total[rows] += (loss.entropies[rows].double() * of_entropies).sum(dim=1) / step.ranks.count
    return total


def _times_optimizer_factor(change: EntropyChange, direction: Vector) -> Vector:
    """Returns a ⊙ direction: what this step, with its own P and clipping, makes of a small gradient."""
    scaled = change.layout.zeros()
    for piece in change.pieces:
        factor = piece.state.gradient_factor(piece.param, change.clip * piece.of(change.gradient))
        piece.of(scaled).copy_(change.clip * factor * piece.of(direction))
    return scaled


def _step_size(step: Step, direction: Vector, rows: Tensor) -> float:
    """Returns the factor of `direction` that changes these rows' log-probabilities by CHANGE, or a smaller one."""
    parameters = step.entropy_change.layout.vector(p.detach() for p in step.gradients.parameters.values())
    length = float(dot(direction, direction).sqrt()) or torch.finfo(direction[0].dtype).tiny
    size = LARGEST * float(dot(parameters, parameters).sqrt()) / length
    of_logps, _ = _half_changes(step, direction, size, rows)
    change = float((of_logps.square().sum() / step.batch.rollout.completion_mask[rows].sum()).sqrt())
    return size * min(1.0, CHANGE / change) if change > 0 else size


def _half_changes(step: Step, direction: Vector, size: float, rows: Tensor) -> Tensor:
    """Returns half of what log-probabilities and entropies change from θ − step to θ + step, (2, rows, T) fp64.

    The step is `size` times the direction. Zero at padding.
    """
    along, ends = step.entropy_change.layout.by_name(direction), []
    for sign in (size, -size):
        shift = {name: (sign * along[name]).view(p.shape).to(p) for name, p in step.gradients.parameters.items()}
        with step.policy.shifted(shift):
            scores = step.policy.score_rollout(take_rows(step.batch.rollout, rows))
        both = torch.stack([scores.logps, scores.entropies]).double()
        ends.append(both.masked_fill(scores.mask == 0, 0.0))
    return (ends[0] - ends[1]) / 2.0


def _describe(step: Step, row: int) -> dict[str, str | float]:
    rollout = step.batch.rollout
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
    response = rollout.completion_ids[row][rollout.token_mask[row].bool()]
    return {
        "prompt": step.policy.decode(prompt),
        "response": step.policy.decode(response),
        "reward": float(rollout.rewards[row]) if rollout.rewards is not None else math.nan,
        "advantage": float(rollout.advantages[row]),
    }
