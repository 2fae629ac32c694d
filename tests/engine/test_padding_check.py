"""Whether padding changes log-probabilities: decided by a mean over tokens, repeatedly, and alike on all ranks."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_steps import ALONE
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from rl_training.engine.padding_check import PADDING_MATTERS, PaddingCheck
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import Ranks
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores

SEQUENCES, TOKENS = 4, 250


def sampled(sequences: int = SEQUENCES, tokens: int = TOKENS) -> Rollout:
    """Return sequences whose prompts have 4, 8, … tokens, so the first ones have the most padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = 4 * torch.arange(1, sequences + 1)
    prompt_mask = (torch.arange(4 * sequences) >= 4 * sequences - lengths.unsqueeze(1)).long()
    prompts = torch.randint(4, 50, prompt_mask.shape, generator=generator) * prompt_mask
    completions = torch.randint(4, 50, (sequences, tokens), generator=generator)
    advantages = torch.zeros(sequences)
    index = torch.arange(sequences)
    mask = torch.ones_like(completions)
    return Rollout(prompts, prompt_mask, completions, mask, advantages, None, index, None, on_policy=True)


class Said:
    """A policy with log-probabilities 0 without padding, and the given ones with padding."""

    def __init__(self, padded: Tensor, mask: Tensor | None = None, rounding_reason: str = "") -> None:
        self.padded, self.mask = padded, torch.ones_like(padded) if mask is None else mask
        self.scorer = SimpleNamespace(score=self.score, score_padded=self.score_padded, rounding_reason=rounding_reason)
        self.asked: list[list[int]] = []
        self.model = nn.Module()

    def score(self, rollout: Rollout, rows: Tensor, graph: bool) -> Scores:
        self.asked.append(rows.tolist())
        return Scores(torch.zeros_like(self.padded), torch.zeros_like(self.padded), self.mask)

    def score_padded(self, rollout: Rollout, rows: Tensor) -> Scores:
        return Scores(self.padded, self.padded, self.mask)

    measuring = contextlib.nullcontext


def answer(policy: Any, ranks: Ranks = ALONE, rollout: Rollout | None = None) -> str:
    return PaddingCheck().check(rollout or sampled(), policy, ranks)


def test_one_token_with_a_large_difference_is_not_reported() -> None:
    """One of 1000 tokens is off by 5, so the mean is .005."""
    padded = torch.zeros(SEQUENCES, TOKENS)
    padded[1, 17] = -5.0
    assert answer(Said(padded)) is None


@pytest.mark.parametrize(
    ("difference", "rounded", "matters"),
    [(0.009, "", False), (0.011, "", True), (0.09, "bf16", False), (0.11, "bf16", True), (torch.nan, "bf16", True)],
)
def test_the_mean_difference_decides_with_more_tolerance_for_rounded_weights(
    difference: float, rounded: str, matters: bool
) -> None:
    padded = torch.full((SEQUENCES, TOKENS), difference)
    padded[::2] *= -1  # the mean is over absolute differences
    assert bool(answer(Said(padded, rounding_reason=rounded))) == matters


def test_tokens_after_the_end_of_a_response_do_not_count() -> None:
    padded = torch.full((SEQUENCES, TOKENS), torch.nan)
    padded[:, 0] = 0.0
    assert answer(Said(padded, mask=(torch.arange(TOKENS) < 1).expand(SEQUENCES, -1).long())) is None


class Scoring(Policy):
    def sample(self, num_sequences: int, seed: int) -> Rollout:
        raise NotImplementedError

    def decode(self, ids: Tensor) -> str:
        raise NotImplementedError


def absolute() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model", "reason"), [(lambda: load_tiny()[0], None), (absolute, PADDING_MATTERS)])
def test_absolute_positions_are_distinguished_from_rounding(dtype: torch.dtype, model: Any, reason: str) -> None:
    model = model().to(dtype)
    assert answer(Scoring(model, Scorer(model), 4), rollout=sampled(tokens=60)) == reason


def test_padding_is_checked_at_measured_steps_1_10_and_100_on_the_most_padded_rows() -> None:
    policy, check, asked_at = Said(torch.zeros(4, 3)), PaddingCheck(), []
    rollout = sampled(sequences=9)
    for step in range(1, 102):
        assert check.check(rollout, policy, ALONE) is None  # type: ignore[arg-type]
        if len(policy.asked) > len(asked_at):
            asked_at.append(step)
    assert asked_at == [1, 10, 100]
    assert policy.asked == [[0, 1, 2, 3]] * 3


def test_a_padding_dependence_once_found_is_kept() -> None:
    policy, check = Said(torch.ones(4, 3)), PaddingCheck()
    rollout = sampled()
    for _ in range(12):
        assert check.check(rollout, policy, ALONE) == PADDING_MATTERS  # type: ignore[arg-type]
    assert len(policy.asked) == 1


@pytest.mark.parametrize(("of_other", "matters"), [(0.0, False), (1.0, True)])
def test_a_rank_with_empty_responses_joins_the_reduction_and_agrees(of_other: float, matters: bool) -> None:
    zeros = torch.zeros(SEQUENCES, TOKENS)
    ranks = Said(zeros, mask=zeros), Said(torch.full((SEQUENCES, TOKENS), of_other))
    sent: list[Tensor] = []

    def send(tensor: Tensor) -> Tensor:
        sent.append(tensor)
        return tensor

    for rank in ranks:
        answer(rank, Ranks(2, send))
    assert len(sent) == 2  # one reduction per rank
    said = {answer(rank, Ranks(2, lambda _: torch.stack(sent).sum(dim=0))) for rank in ranks}
    assert said == {PADDING_MATTERS if matters else None}


def test_empty_responses_on_all_ranks_are_not_reported() -> None:
    zeros = torch.zeros(SEQUENCES, TOKENS)
    assert answer(Said(zeros, mask=zeros)) is None
