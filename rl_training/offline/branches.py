"""Takes several real steps from a checkpoint with each intervention, and measures entropy and reward after them.

All branches draw the same prompts with common random numbers, so they differ only by the intervention and its effects.
Each starts from the checkpoint's weights and optimizer, at its learning rate; both are restored bit for bit. At the end
fresh responses to E's prompts are drawn, again with common random numbers, and the branch is compared with the plain
one prompt by prompt.

It is the only measurement that captures effects that grow with the distance, such as a KL term's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl_training.engine.changed_steps import bases_of
from rl_training.interventions.named import Intervention
from rl_training.mathematics.adamw import clip_coefficient
from rl_training.mathematics.jackknife import Replicates
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Layout
from rl_training.offline.buffers import sample_update
from rl_training.offline.intervention_effects import OnEvaluation, inputs_of, weights_of
from rl_training.offline.loss import batch_of
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Settings

BETWEEN_STEPS = 1009  # difference between the seeds of U of consecutive steps; a sweep uses other seeds


def branches(
    on: OnEvaluation,
    restored: RestoredTrainer,
    settings: Settings,
    which: Sequence[Intervention],
    steps: int,
    seed: int,
) -> Iterator[tuple[str, Replicates | str]]:
    """Yields by name, after so many steps, (ΔH, Δreward) of each branch beside the plain one; or why there is none.

    Replicates are (2,): nats per token and reward per response, leaving out each prompt of E.

    seed  of the first step's U
    """
    plain, _ = _branch(on, restored, settings, None, steps, seed)
    for of in which:
        answers, why_none = _branch(on, restored, settings, of, steps, seed)
        yield of.name, why_none or on.difference(plain, answers)


def _branch(
    on: OnEvaluation, restored: RestoredTrainer, settings: Settings, of: Intervention | None, steps: int, seed: int
) -> tuple[tuple[Scores, Tensor], str]:
    """Returns responses to E's prompts at the end of a branch, or the reason why it could not be taken."""
    with put_back(restored):
        for number in range(steps):
            asked = replace(settings.update, seed=seed + BETWEEN_STEPS * number)
            buffer = sample_update(restored, asked, settings.memory.generation_size)
            batch = batch_of(restored, buffer)
            weights, lr_factor, threshold = batch.loss_weights, 1.0, restored.optimizer.max_grad_norm
            if of is not None:
                loss = inputs_of(restored, batch, [of])
                why_none = of.why_none(loss[0])
                if why_none:
                    return on.answers(), why_none
                parts = [of(part) for part in loss]
                weights, lr_factor = weights_of(parts, batch), parts[0].lr_factor
                threshold = threshold if parts[0].max_grad_norm is None else parts[0].max_grad_norm
            layout = Layout(restored.parameters)
            known = (batch, restored.policy, list(restored.parameters.values()), layout)
            ((_, basis),) = bases_of(*known, [weights], restored.reduce)
            _take_step(restored, layout.by_name(basis.mean), lr_factor, threshold)
        return on.answers(), ""


def _take_step(restored: RestoredTrainer, gradient: dict[str, Tensor], lr_factor: float, threshold: float) -> None:
    """Makes the optimizer's own step with this gradient, by name, clipped here."""
    optimizer = restored.trainer.optimizer
    norm = torch.stack([part.double().square().sum() for part in gradient.values()]).sum().sqrt()
    clip = clip_coefficient(norm, threshold)
    for name, param in restored.parameters.items():
        param.grad = (clip * gradient[name]).view(param.shape).to(param.dtype)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr_factor * rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def put_back(restored: RestoredTrainer) -> Iterator[None]:
    """A context that restores weights and optimizer states at its end, bit for bit and in the same tensors."""
    states = restored.trainer.optimizer.state
    tensors: list[Tensor] = [*restored.parameters.values()]
    tensors += [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
