"""The kernel of a look at a checkpoint: between its E and its U, of its very step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.mathematics.entropy import Estimator, surrogate_weights
from rl_training.offline.first_order import TOKEN
from rl_training.offline.gradient_rows import GradientRows
from rl_training.offline.kernel import calculate_kernel
from rl_training.offline.kernel_types import KernelSettings, Question, Ranks, Step
from rl_training.offline.probe import Look
from rl_training.offline.sequences import write_sequences
from rl_training.offline.standing import Standing
from rl_training.offline.update import Update
from rl_training.step.rollout import Rollout, join_rollouts, take_rows


def kernel_of_look(
    standing: Standing, look: Look, settings: KernelSettings, folder: Path, estimator: Estimator = "rb"
) -> Path:
    """Returns the file with the kernel between the E and the U of a look at a checkpoint, of its very step.

    estimator  of the entropy gradient, that of the look's first order

    Raises ValueError as `calculate_kernel` does, and where the look has no first order.
    """
    if look.first_order is None:
        raise ValueError("kernel.enabled=true needs the entropy gradient: set first_order.enabled=true")
    evaluation = look.evaluation
    of_e, of_u = (_of_all_processes(buffer.rollout, standing) for buffer in (evaluation, look.update_buffer))
    scores = evaluation.scores
    weights = surrogate_weights(
        scores.logps, scores.entropies, scores.mask, of_e.prompt_index, estimator, "token", "buffer"
    )
    question = Question(of_e, *weights, of_u, standing.trainer.max_completion_length)
    rows = GradientRows(standing.trainer, standing.parameters, settings.microbatch_size)
    ranks = Ranks(standing.rank, standing.num_ranks, standing.trainer.accelerator.wait_for_everyone)
    step = step_of(look.update, look.first_order.direction[TOKEN])
    about = {"checkpoint": str(standing.checkpoint), "step": str(standing.step + 1), "baseline": "buffer"}
    path = calculate_kernel(rows, step, question, settings, folder, ranks, about)
    write_sequences(standing, look.evaluation, look.update, of_e, of_u, folder)
    return path


def step_of(update: Update, entropy_gradient: Tensor) -> Step:
    """Returns the step that U makes, with the metric M in which it takes this step's gradient.

    entropy_gradient  (P,), x̄
    """
    root = torch.empty_like(update.gradient)
    for piece in update.pieces:
        factor = piece.state.gradient_factor(piece.param, update.clip * update.gradient[piece.columns])
        root[piece.columns] = (-factor).sqrt()
    return Step(update.gradient, entropy_gradient, update.clip, root, torch.stack(list(update.parts)))


def _of_all_processes(rollout: Rollout, standing: Standing) -> Rollout:
    """Returns the sequences of all processes, on each of them, in the order of `prompt_index`."""
    if standing.num_ranks > 1:
        parts: list[Any] = [None] * standing.num_ranks
        torch.distributed.all_gather_object(parts, _on(rollout, torch.device("cpu")))
        rollout = _on(join_rollouts(parts), standing.device)
    return take_rows(rollout, rollout.prompt_index.argsort(stable=True))


def _on(rollout: Rollout, device: torch.device) -> Rollout:
    values: dict[str, Any] = {
        key: value.to(device) for key, value in vars(rollout).items() if isinstance(value, Tensor)
    }
    return dataclasses.replace(rollout, **values)
