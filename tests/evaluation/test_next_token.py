"""Divergences of next-token distributions, compared with their definitions."""

from __future__ import annotations

import math

import pytest
import reference
import torch

from rl_training.evaluation.next_token import CHUNK_ENTRIES, kl_divergences


def test_divergences_equal_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = (3 * torch.randn(20, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    values = kl_divergences(logits, other)
    for row in range(20):
        p, q = (reference.log_softmax(table[row].tolist()) for table in (logits, other))
        assert values[row].item() == pytest.approx(
            sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True)), abs=1e-12
        )


@pytest.mark.parametrize("scale", [1.0, 5.0, 20.0])
def test_divergences_of_fp32_logits_over_a_real_vocabulary_are_within_1e_7_nats_of_fp64(scale: float) -> None:
    """From a nearly uniform to a nearly certain distribution. The twin computes every term in fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(8, 151_936, generator=generator)
    other = logits + 0.05 * torch.randn(logits.shape, generator=generator)
    p, q = (table.double().log_softmax(dim=-1) for table in (logits, other))
    torch.testing.assert_close(kl_divergences(logits, other), (p.exp() * (p - q)).sum(dim=-1), rtol=0, atol=1e-7)


def test_a_policy_has_no_divergence_from_itself_even_with_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0], [2.0, 0.5, -math.inf]])
    assert kl_divergences(logits, logits).tolist() == [0, 0]


def test_divergences_do_not_depend_on_the_split_of_positions() -> None:
    width = CHUNK_ENTRIES // 2
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).repeat(1, width // 5 + 1)[:, :width]
    together = kl_divergences(logits, logits.flip(0))
    for row in range(3):
        assert kl_divergences(logits[row : row + 1], logits.flip(0)[row : row + 1]).item() == together[row].item()
