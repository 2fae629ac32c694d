"""Claims on the averages over a step's responses, in the line of a loop that logs nothing itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from plain_loop import rollout_of

from rl_training.engine.step_result import StepResult
from rl_training.hosts.step_averages import step_averages
from rl_training.policy.scores import Scores


def test_equal_rewards_have_exactly_zero_spread() -> None:
    """In torch, the standard deviation of nine times .7 is not 0."""
    rewards = torch.full((27,), 0.7, dtype=torch.float64)
    rewards[-1] = 0.0
    part = dataclasses.replace(rollout_of(1), rewards=rewards, prompt_index=torch.arange(27) // 9)
    part = dataclasses.replace(part, completion_mask=torch.ones(27, 1), completion_ids=torch.ones(27, 1))
    scores = Scores(torch.zeros(27, 1), torch.zeros(27, 1), torch.ones(27, 1))
    result = StepResult(1.0, rollouts=[part], scores=[scores])
    assert step_averages(result)["frac_reward_zero_std"] == pytest.approx(2 / 3)


def test_averages_skip_masked_tokens_and_are_nan_with_missing_rewards() -> None:
    rewards, mask = torch.tensor([math.nan, 1.0, 1.0, 1.0]), torch.tensor([[1.0, 0.0]] * 4)
    part = dataclasses.replace(rollout_of(1), rewards=rewards, prompt_index=torch.tensor([0, 0, 1, 1]))
    part = dataclasses.replace(part, completion_mask=mask, completion_ids=torch.ones(4, 2))
    scores = Scores(torch.zeros(4, 2), torch.tensor([[2.0, 5.0]] * 4), mask)
    averages = step_averages(StepResult(1.0, rollouts=[part], scores=[scores]))
    assert (averages["entropy"], averages["completions/mean_length"]) == (2.0, 1.0)
    assert math.isnan(averages["reward"])
    assert math.isnan(averages["frac_reward_zero_std"])
