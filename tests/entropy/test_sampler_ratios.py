"""Ratios to another sampler: on processes with different widths, and `forward` on responses from another policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from example_steps import scored
from ranks_in_threads import on_two_ranks
from torch import Tensor
from two_turns import LOGITS, coverage

from rl_training.entropy.fold_gradients import ratios_to_sampler, totals_of_folds
from rl_training.parallel.ranks import Ranks
from rl_training.policy.scores import Scores

SAMPLER = [[x + 0.35 * math.sin(7 * i + 3 * j + 1) for j, x in enumerate(row)] for i, row in enumerate(LOGITS)]


def part_of(rows: slice, width: int) -> Any:
    """Return a step's batch with some of eight sequences of up to five tokens, padded to this width."""
    draw = torch.Generator().manual_seed(2)
    mask = torch.arange(5) < torch.tensor([3, 1, 2, 3, 5, 4, 1, 5]).unsqueeze(1)
    logps, sampled, entropies = (torch.randn(8, 5, generator=draw, dtype=torch.float64) for _ in range(3))
    scored_values = [values[rows, :width] for values in (logps, entropies, mask)]
    rollout = SimpleNamespace(
        sampling_logps=sampled[rows, :width],
        completion_mask=scored_values[2],
        on_policy=True,
        has_unknown_sampler=False,
    )
    fold = torch.arange(8)[rows] // 4
    return dataclasses.replace(
        scored(rollout, Scores(*scored_values)), fold=fold, fold_sizes=torch.tensor([4.0, 4.0]).double()
    )


def levels(rank: int, reduce: Callable[[Tensor], Tensor], parts: int) -> Tensor:
    rows, width = (slice(0, 4), 3) if rank == 0 else (slice(4, 8), 5)
    batch = part_of(slice(0, 8), 5) if parts == 1 else part_of(rows, width)
    ranks = Ranks(parts, reduce, rank)
    return totals_of_folds(batch, ranks, ratios_to_sampler(batch, ranks))


def test_levels_on_two_processes_with_unequal_widths_equal_those_on_one() -> None:
    whole = levels(0, lambda tensor: tensor, 1)
    for levels_of_rank in on_two_ranks(lambda rank, reduce: levels(rank, reduce, 2)):
        torch.testing.assert_close(levels_of_rank, whole, rtol=1e-12, atol=1e-12)
    assert whole[:, 0].tolist() == [4.0, 4.0]


def test_the_terms_of_a_fold_include_its_effect_on_the_normalisers() -> None:
    """Central differences give ∂/∂w of Σ w · Σ_k Σ w ρh / Σ w ρ, where w weights the sequences of a fold."""
    batch = part_of(slice(0, 8), 5)
    logs = batch.log_ratios()
    before = (logs.cumsum(dim=1) - logs).exp()
    exact = batch.scores.exact()

    def whole(weights: Tensor) -> Tensor:
        means = [weights @ (before * part) / (weights @ before) for part in (exact.entropies, exact.mask)]
        return weights.sum() * torch.stack(means).sum(dim=1)

    levels_of_rank = levels(0, lambda tensor: tensor, 1)
    ones = torch.ones(8, dtype=torch.float64)
    for fold, rows in enumerate((slice(0, 4), slice(4, 8))):
        more = torch.zeros_like(ones)
        more[rows] = 1e-5
        slopes = (whole(ones + more) - whole(ones - more)) / 2e-5
        torch.testing.assert_close(levels_of_rank[fold, 1:], slopes, rtol=1e-7, atol=1e-7)


def test_forward_is_unbiased_on_samples_of_another_policy_and_its_error_bars_cover() -> None:
    """The truth is enumerated. Over 400 batches: off by 1.0 standard errors with ratios, by 10 without."""
    coverages = coverage(60, seed=1, sampler=SAMPLER)
    for truth, mean, error, covered in zip(*coverages, strict=True):
        assert abs(mean - truth) < 4 * error
        assert 0.86 <= covered <= 1.0
