"""Claims on the log line about a step from which nothing is learned because all rewards are equal."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest
import torch
from trainers import FEW

from rl_training.hosts.equal_rewards import equal_rewards_warning
from rl_training.parallel.ranks import Ranks, all_ranks
from rl_training.policy.rollout import Rollout, as_rollout


def responses(rewards: list[float] | None, *, advantage: float = 0.0, cut_off: int = 0) -> Rollout:
    """Return four responses of one to four tokens. The last `cut_off` of them were cut off."""
    lengths = range(1, 5)
    rollout = as_rollout([torch.ones(2, dtype=torch.long)] * 4, [torch.ones(n) for n in lengths], [0, 0, 1, 1], pad=0)
    return dataclasses.replace(
        rollout,
        rewards=None if rewards is None else torch.tensor(rewards),
        advantages=torch.full((4,), advantage),
        truncated=torch.arange(4) >= 4 - cut_off,
    )


def why(*parts: Rollout, ranks: Ranks | None = None) -> str:
    return equal_rewards_warning(parts, ranks or all_ranks(), "raise the limit")


def test_equal_rewards_are_reported_with_their_number_and_value() -> None:
    said = why(responses([0.0] * 4), responses([0.0] * 4))
    assert said.startswith("all 8 responses earned 0, so every advantage is 0 and nothing is learned from them. ")
    assert "partial rewards" in said
    assert "cut off" not in said


def test_rewards_that_differ_by_the_rounding_of_a_weighted_sum_are_equal() -> None:
    """As the filtered buffer and frac_reward_zero_std judge them: 0.6 + 0.3 is not 0.3 + 0.45 + 0.15 in float32."""
    weights, by_function = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([[1.0, 1.0, 0.0], [0.5, 1.5, 1.5]])
    rewards = (by_function * weights).nansum(dim=1).tolist() * 2
    assert len({*rewards}) == 2
    assert why(responses(rewards)).startswith("all 4 responses earned 0.9, so every advantage is 0")


def test_truncated_responses_are_named_as_the_likely_cause_of_equal_rewards() -> None:
    said = why(responses([0.0] * 4, cut_off=3), responses([0.0] * 4, cut_off=4))
    assert said.endswith(" 88% of them were cut off, the longest at 4 tokens: raise the limit")


@pytest.mark.parametrize(
    "parts",
    [
        [responses([0.0, 0.0, 0.0, 1.0])],
        [responses([0.0] * 4), responses([1.0] * 4)],
        [responses(None)],
        [responses([0.5] * 4, advantage=0.5)],
    ],
    ids=["differ", "differ between microbatches", "not known", "a baseline of another kind"],
)
def test_rewards_that_differ_or_are_unknown_cause_no_warning(parts: list[Rollout]) -> None:
    assert why(*parts) == ""


def test_rewards_are_compared_over_all_processes() -> None:
    other = torch.tensor([1.0, 1.0, 0.0, 4.0, 0.0, 4.0], dtype=torch.float64)
    two = Ranks(2, lambda table: table + torch.stack([torch.zeros_like(other), other]))
    assert why(responses([0.0] * 4), ranks=two) == ""
    two = Ranks(
        2, lambda table: table + torch.stack([torch.zeros_like(other), other * torch.tensor([0, 0, 1, 1, 1, 1])])
    )
    assert why(responses([0.0] * 4), ranks=two).startswith("all 8 responses earned 0")


def test_a_training_without_rewards_warns_once_at_its_first_step(
    make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The tiny model's answers need more than two tokens, so all of them are cut off."""
    settings = FEW | {"max_completion_length": 2, "reward": lambda completions, **_: [0.0] * len(completions)}
    trainer = make_trainer(**settings)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (line,) = [line for line in caplog.messages if "nothing is learned" in line]
    assert re.match(r"step 1: all 8 responses earned 0, .* cut off, .* 2 tokens: raise max_completion_length$", line)
