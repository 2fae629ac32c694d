"""Trainer subclasses as users write them: their loss, advantages or batch differ from what the settings say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PLAIN: dict[str, Any] = {
    "config_class": GRPOConfig, "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "bf16": False,
    "use_cpu": True, "gradient_checkpointing": False,  # which would score everything twice
}  # fmt: skip


class WithSupervision(GRPOTrainer):
    """Adds a supervised loss on one extra sequence at the steps in `at`."""

    at: tuple[int, ...] = (1, 2, 3)
    share = 0.3

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.state.global_step + 1 not in self.at:
            return loss
        text = "3+4-2=?<think>3+4=7 7-2=5</think><answer>5</answer>"
        ids = self.processing_class([text], return_tensors="pt").input_ids
        return loss + self.share * model(input_ids=ids, labels=ids).loss / self.current_gradient_accumulation_steps


class PositiveSamples(GRPOTrainer):
    """Reinforces only responses that were better than the group's mean."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        return {**output, "advantages": output["advantages"].clamp(min=0)}


class Longer(TrainerCallback):
    """Raises the maximum response length during training; Dr-GRPO's loss is divided by it."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer: Any = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.max_completion_length = 8 * (1 + state.global_step)
        self._trainer.generation_config.max_new_tokens = self._trainer.max_completion_length


def some_rewards(completions: list[str], **kwargs: Any) -> list[float | None]:
    """Return None as the reward of a third of the responses."""
    sums = [sum(map(ord, text)) for text in completions]
    return [None if number % 3 == 0 else float(number % 7) for number in sums]


def above_the_others(rewards: Tensor, group: int) -> Tensor:
    """Return each response's reward minus the mean of the others' in its group, float64; 0 if there are no others."""
    weights = []
    for row, reward in enumerate(rewards.tolist()):
        first = row // group * group
        others = [r for j, r in enumerate(rewards.tolist()[first : first + group], first) if j != row and r == r]
        weights.append(reward - sum(others) / len(others) if reward == reward and others else 0.0)
    return torch.tensor(weights, dtype=torch.float64)


class Replay(GRPOTrainer):
    """Replaces groups of equal rewards by groups of the last rollout, with the log-probabilities they had then."""

    keeps_logps = True  # pass these log-probabilities on to TRL's loss
    kept: dict[str, Tensor] | None = None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        self.rewards_of_rows = self._latest.clone()
        names = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"]
        if self.keeps_logps:
            out["old_per_token_logps"] = self.scores_of(out).clone()
            names.append("old_per_token_logps")
        fresh = {name: out[name].clone() for name in names} | {"reward": self._latest.clone()}
        self.true_ess, self.replayed = float(len(out["advantages"])), 0
        if self.kept is not None:
            spread = out["advantages"].view(-1, self.num_generations).any(dim=1).repeat_interleave(self.num_generations)
            rows = torch.arange(self.num_generations) if spread.all() else (~spread).nonzero().squeeze(1)
            self.replayed = len(rows)
            for name in names:
                out[name][rows] = widened(self.kept[name], out[name].shape, name)[rows]
            self.rewards_of_rows[rows] = self.kept["reward"][rows]
        if self.keeps_logps:
            logs = ((self.scores_of(out) - out["old_per_token_logps"]) * out["completion_mask"]).sum(dim=1).double()
            self.true_ess = float(logs.exp().sum() ** 2 / (2 * logs).exp().sum())
        self.kept = fresh
        return out

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._latest = rewards[:, 0]
        return rewards

    def scores_of(self, out: dict[str, Any]) -> Tensor:
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(self.model, ids, mask, out["completion_ids"].shape[1])[0]


def widened(rows: Tensor, shape: torch.Size, name: str) -> Tensor:
    """Pad rows to the width of others: prompts on the left, responses on the right."""
    if rows.ndim == 1:
        return rows
    missing = shape[1] - rows.shape[1]
    if name.startswith("prompt"):
        return torch.nn.functional.pad(rows, (missing, 0))
    return torch.nn.functional.pad(rows, (0, missing))


class DrawsAgain(GRPOTrainer):
    """Dynamic sampling: prompts whose responses all earn the same are replaced from a second rollout of equal size."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        rounds, rewards = [], []
        for _ in range(2):
            rounds.append(super()._generate_and_score_completions(inputs))
            rewards.append(self._latest)
        first, second = rounds
        group = self.num_generations
        alike = (first["advantages"].view(-1, group) == 0).all(dim=1).repeat_interleave(group)
        self.rewards_of_rows = torch.where(alike, rewards[1], rewards[0])
        width = max(part["completion_ids"].shape[1] for part in rounds)
        out = dict(second)
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"):
            before, other = (part[name] for part in rounds)
            if name.startswith("completion"):
                before, other = (widened(part, torch.Size((len(part), width)), name) for part in (before, other))
            chosen = alike if before.ndim == 1 else alike.unsqueeze(1)
            out[name] = torch.where(chosen, other, before)
        return out

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._latest = rewards[:, 0]
        return rewards


class KeepsSome(GRPOTrainer):
    """Trains only on some rows of the rollout: those that the function `rows` selects from it.

    It fills the same dictionary for every rollout, and so returns again whatever was added to that.
    """

    rows: Any = None
    kept: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        rows = self.rows(out)
        self.rewards_of_rows = self._latest[rows]
        self.kept = vars(self).get("kept", {})
        self.kept.update({k: v[rows] if isinstance(v, Tensor) and v.ndim else v for k, v in out.items()})
        return self.kept

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._latest = rewards[:, 0]
        return rewards
