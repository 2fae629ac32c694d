"""Next-token distributions kept to measure KL: all tokens of a small vocabulary, the likeliest of a large one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_training.policy import token_distributions
from rl_training.policy.token_distributions import TokenDistributions


def exact_kl(before: Tensor, after: Tensor) -> Tensor:
    """Return KL by its definition, (N,), of (N, V) logits."""
    p, q = (z.double().log_softmax(dim=-1) for z in (before, after))
    return (p.exp() * (p - q).masked_fill(p == -torch.inf, 0.0)).sum(dim=-1)


def kl_of(before: Tensor, after: Tensor) -> Tensor:
    kept = TokenDistributions.of_logits(before.clone())
    return kept.kl_to(TokenDistributions.of_logits(after.clone(), kept.tokens))


def test_over_a_small_vocabulary_kl_is_exact_even_for_policies_that_hardly_differ() -> None:
    torch.manual_seed(0)
    before = 3.0 * torch.randn(50, 30)
    for size in (1.0, 1e-2, 1e-4):
        after = before + size * torch.randn(50, 30)
        torch.testing.assert_close(kl_of(before, after), exact_kl(before, after), rtol=2e-2, atol=0.0)


def test_over_a_large_vocabulary_it_is_at_most_the_true_kl_and_close_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_distributions, "MAX_TOKENS", 100)
    torch.manual_seed(0)
    before = 4.0 * torch.randn(200, 1000)
    after = before + 0.1 * torch.randn(200, 1000)
    kl, true = kl_of(before, after), exact_kl(before, after)
    assert (kl <= true * (1 + 1e-4)).all()
    assert 0.9 < float(kl.mean() / true.mean()) < 0.999
    joined = kl_of(before, before - 2.0 * (before < before.topk(100).values[:, -1:]))  # others change as one
    torch.testing.assert_close(joined, exact_kl(before, before - 2.0 * (before < before.topk(100).values[:, -1:])))


def test_tokens_that_neither_policy_allows_add_nothing_and_lost_tokens_make_it_infinite() -> None:
    before, after = torch.zeros(2, 4), torch.zeros(2, 4)
    before[:, 3] = after[:, 3] = -torch.inf
    after[0, 0] = 1.0
    torch.testing.assert_close(kl_of(before, after), exact_kl(before, after))
    after[1, 2] = -torch.inf
    assert kl_of(before, after)[1] == math.inf
