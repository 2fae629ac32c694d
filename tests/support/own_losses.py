"""Trainers as people write them: subclasses whose loss, advantages or batch are not what the settings say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PLAIN: dict[str, Any] = {
    "config_class": GRPOConfig, "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "bf16": False,
    "use_cpu": True,
}  # fmt: skip


class WithSupervision(GRPOTrainer):
    """Adds a supervised loss on one other sequence, at the steps that `at` names."""

    at: tuple[int, ...] = (1, 2, 3)
    share = 0.3

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.state.global_step + 1 not in self.at:
            return loss
        ids = self._tokenizer(["3+4-2=?<think>3+4=7 7-2=5</think><answer>5</answer>"], return_tensors="pt").input_ids
        return loss + self.share * model(input_ids=ids, labels=ids).loss / self.current_gradient_accumulation_steps


class PositiveSamples(GRPOTrainer):
    """Reinforces what was better than the group's mean, and nothing else."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        return {**output, "advantages": output["advantages"].clamp(min=0)}


class Longer(TrainerCallback):
    """Raises the longest response while training runs, by which Dr-GRPO's loss is divided."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer: Any = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.max_completion_length = 8 * (1 + state.global_step)
        self._trainer.generation_config.max_new_tokens = self._trainer.max_completion_length


def some_rewards(completions: list[str], **kwargs: Any) -> list[float | None]:
    """A reward that says nothing of a third of the responses."""
    sums = [sum(map(ord, text)) for text in completions]
    return [None if number % 3 == 0 else float(number % 7) for number in sums]


def above_the_others(rewards: Tensor, group: int) -> Tensor:
    """Returns, one response after another, its reward less the mean of the others'; 0 without any, in float64."""
    found = []
    for row, own in enumerate(rewards.tolist()):
        first = row // group * group
        others = [r for j, r in enumerate(rewards.tolist()[first : first + group], first) if j != row and r == r]
        found.append(own - sum(others) / len(others) if own == own and others else 0.0)
    return torch.tensor(found, dtype=torch.float64)
