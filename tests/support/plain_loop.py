"""Dr-GRPO in plain PyTorch on given rollouts: the loop that tests train, with hooks for planting mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from shared_rollouts import L_MAX, MICROBATCH, PROMPTS, G, given_rollout, rewards_of
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from rl_training import Estimate, Rollout
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.policy.rollout import take_rows

CLIP = 0.05  # every step is clipped
Action = Callable[[Any, torch.optim.Optimizer], object]


def rollout_of(number: int) -> Rollout:
    """Return the rollout that ReplayTrainer is given, padded to its longest sequence."""
    given = given_rollout(number)
    given.pop("num_items_in_batch")
    width = int(given["completion_mask"].sum(dim=1).max())
    given |= {name: given[name][:, :width] for name in ("completion_ids", "completion_mask")}
    index = torch.arange(PROMPTS * G) // G
    return Rollout(**given, rewards=rewards_of(given), prompt_index=index, untested=True)


def microbatches(number: int, size: int = MICROBATCH) -> list[Rollout]:
    rollout = rollout_of(number)
    return [take_rows(rollout, rows) for rows in torch.arange(PROMPTS * G).split(size)]


def scores_of(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and entropies of the response tokens."""
    ids = torch.cat([part.prompt_ids, part.completion_ids], dim=1)
    there = torch.cat([part.prompt_mask, part.completion_mask], dim=1)
    logits = model(input_ids=ids, attention_mask=there, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp = logits[:, part.prompt_ids.shape[1] - 1 : -1].log_softmax(dim=-1)
    return logp.gather(-1, part.completion_ids.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(dim=-1)


def loss_of(logps: Tensor, part: Rollout, microbatches: int) -> Tensor:
    ratios = (logps - logps.detach()).exp()
    total = (ratios * part.advantages.unsqueeze(1).to(logps) * part.completion_mask).sum()
    return -total / (len(logps) * L_MAX) / microbatches


def no_action(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Do nothing: a correct loop does nothing between its parts."""


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    measured: MeasuredLoop,
    steps: int = 3,
    *,
    size: int = MICROBATCH,
    count: int | None = None,  # number of microbatches to use in a step, by default all
    entropies: bool = True,
    clip: float | None = CLIP,
    zero_grad: bool = True,
    forward: Callable[[Any, Rollout], tuple[Tensor, Tensor]] = scores_of,
    sampler: Callable[[Tensor, Tensor], Tensor] | None = None,  # (policy's log-probabilities, tokens) → the sampler's
    backward: Callable[[Tensor], object] = Tensor.backward,
    between: Action = no_action,  # between two microbatches
    ready: Action = no_action,  # after the last backward, before the probes see the gradient
    before_optimizer: Action = no_action,  # between the probes and the optimizer
) -> list[dict[str, Estimate]]:
    """Train, and return the estimates of each step."""
    answers = []
    with measured:
        for number in range(1, steps + 1):
            with measured.step(number) as metrics:
                for part in (parts := microbatches(number, size)[:count]):
                    logps, of_model = forward(model, part)
                    if sampler is not None:
                        part = dataclasses.replace(part, sampling_logps=sampler(logps.detach(), part.completion_ids))
                    measured.microbatch(part, logps, of_model.detach() if entropies else None)
                    backward(loss_of(logps, part, len(parts)))
                    between(model, optimizer)
                ready(model, optimizer)
                measured.gradients_ready()
                if clip is not None:
                    metrics["grad_norm"] = clip_grad_norm_(model.parameters(), clip)
                before_optimizer(model, optimizer)
                optimizer.step()
                if zero_grad:
                    optimizer.zero_grad()
            answers.append(dict(measured.latest))
    return answers
