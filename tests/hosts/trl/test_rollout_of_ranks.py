"""What a process knows of a rollout beside TRL's batch, worked by hand: rewards by weight, prompts over processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_training.hosts.trl import batches
from rl_training.hosts.trl.rollouts import Rollouts

NONE: Any = None


def rollouts_of(rank: int, per_device: int = 2, steps: int = 3, generations: int = 4) -> Rollouts:
    """Returns the rollouts of a trainer, of which nothing is there but what they ask for."""
    trainer: Any = SimpleNamespace(
        reward_weights=torch.tensor([2.0, 0.5]), accelerator=SimpleNamespace(process_index=rank, num_processes=2),
        args=SimpleNamespace(
            per_device_train_batch_size=per_device, steps_per_generation=steps, num_iterations=1,
            gradient_accumulation_steps=steps,
        ),
        num_generations=generations, mask_truncated_completions=False, state=SimpleNamespace(global_step=0),
        eos_token_ids=[2], _tokenizer=SimpleNamespace(pad_token_id=0), model=SimpleNamespace(training=True),
    )  # fmt: skip
    return Rollouts(trainer, NONE, whole_prompts=False)


def batch(size: int) -> dict[str, Any]:
    """Returns TRL's output with so many sequences of one token."""
    ones = torch.ones(size, 1, dtype=torch.long)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return {**dict.fromkeys(names, ones), "advantages": torch.zeros(size)}


@pytest.mark.parametrize(("rank", "expected"), [(0, [4.0, 1.0]), (1, [-2.0, 3.5])])
def test_the_reward_of_a_sequence_is_the_weighted_sum_of_its_functions(rank: int, expected: list[float]) -> None:
    """2 · 1 + .5 · 4, .5 · 2 where the first function has no opinion; the second two are the other process's."""
    by_function = torch.tensor([[1.0, 4.0], [math.nan, 2.0], [-1.0, 0.0], [1.0, 3.0]])
    rollouts = rollouts_of(rank)
    rollouts._generated.add([[1], [1]], [[1], [1]], None)
    assert rollouts.on_rewards(lambda: by_function) is by_function
    output = batch(2)
    rollouts.begin(output, is_measured=False)
    assert output[batches.REWARD].tolist() == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 0, 0, 0, 1, 1]), (1, [0, 0, 1, 1, 1, 1])])
def test_a_prompt_whose_responses_lie_on_two_processes_is_one(rank: int, expected: list[int]) -> None:
    """Six sequences on each, four to a prompt: the second prompt has two on the first process and two on the other."""
    rollouts = rollouts_of(rank)
    output = batch(6)
    rollouts.begin(output, is_measured=False)
    assert (rollouts.read(output).prompt_index - rollouts.number * 6).tolist() == expected
