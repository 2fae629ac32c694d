"""Claims on benchmarks/real_truth.py: its measurements are right for a policy whose exact values are known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


def policy(seed: int, towards: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return the first token's distribution (0 ends the response), and the second token's after each first token."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, generator=generator), torch.randn(3, 3, generator=generator)
    if towards is not None:
        logits = tuple(old.log() + 0.3 * logit for old, logit in zip(towards, logits, strict=True))
    return logits[0].softmax(0), logits[1].softmax(1)


def entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.log()).sum(dim=-1)


def entropy_per_token(of: tuple[Tensor, Tensor]) -> float:
    first, second = of
    return float((entropy(first) + first[1:] @ entropy(second[1:])) / (1 + first[1:].sum()))


def effect_of_step(real_truth: Any, sample: Any, kept: Tensor) -> float:
    return real_truth.reward_under(sample, "0", "1", kept) - real_truth.reward_under(sample, "0", "0", kept)


def test_the_change_by_a_step_equals_that_of_an_enumerable_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import real_truth

    monkeypatch.setattr(real_truth, "PROMPTS", 300)
    old = policy(seed=1)
    new = policy(seed=2, towards=old)
    generator = torch.Generator().manual_seed(0)
    count = 300 * real_truth.RESPONSES
    first = torch.multinomial(old[0].repeat(count, 1), 1, generator=generator)[:, 0]
    second = torch.multinomial(old[1][first], 1, generator=generator)[:, 0]
    mask = torch.stack([torch.ones_like(first), first != 0], dim=1).bool()
    sample = real_truth.Sample(torch.stack([first, second], dim=1), mask)
    for state, of in {"0": old, "1": new}.items():
        entropies = torch.stack([entropy(of[0]).expand(count), entropy(of[1])[first]], dim=1)
        logps = torch.stack([of[0].log()[first], of[1].log()[first, second]], dim=1)
        sample.scores[state] = (entropies * mask, logps * mask)
    change, stderr = real_truth.jackknife(lambda kept: real_truth.change_of_step({0: sample}, 1, kept))
    exact = entropy_per_token(new) - entropy_per_token(old)
    assert abs(change - exact) < 3 * stderr
    assert stderr < 0.02 * abs(exact)
    sample.rewards = (first == 0).float()  # ending at once is rewarded
    gain, stderr = real_truth.jackknife(lambda kept: effect_of_step(real_truth, sample, kept))
    exact = float(new[0][0] - old[0][0])
    assert abs(gain - exact) < 3 * stderr
    assert stderr < 0.2 * abs(exact)
    sys.modules.pop("real_truth")
