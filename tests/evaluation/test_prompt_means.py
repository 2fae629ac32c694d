"""Means, ratios and shares over prompts, and their errors, by hand and compared with their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from rl_training.evaluation.prompt_means import mean_over_prompts, ratio_over_prompts, share_over_prompts


def test_the_standard_error_of_a_mean_equals_the_value_by_hand() -> None:
    estimate = mean_over_prompts(torch.tensor([1.0, 2.0, 6.0]))
    assert (estimate.value, estimate.num_samples) == (3, 3)
    assert estimate.stderr == pytest.approx(math.sqrt((4 + 1 + 9) / (3 * 2)))


def test_a_prompt_without_a_value_is_left_out_and_without_any_the_mean_has_a_reason() -> None:
    estimate = mean_over_prompts(torch.tensor([1.0, math.nan, 3.0]))
    assert (estimate.value, estimate.num_samples) == (2, 2)
    assert mean_over_prompts(torch.tensor([math.nan])).code == "no_values"
    alone = mean_over_prompts(torch.tensor([2.0]))
    assert (alone.value, alone.code) == (2, "one_value")
    assert math.isnan(alone.stderr)


def test_an_infinite_value_makes_the_mean_infinite_and_its_error_unknown() -> None:
    """For example a divergence at a prompt where the first model gives the policy's response probability 0."""
    estimate = mean_over_prompts(torch.tensor([math.inf, 1.0]))
    assert (estimate.value, estimate.num_samples) == (math.inf, 2)
    assert math.isnan(estimate.stderr)


def test_equal_values_have_exactly_zero_error() -> None:
    """0.1 + 0.1 + 0.1 differs from 0.3 in the last bit."""
    estimate = mean_over_prompts(torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64))
    assert (estimate.value, estimate.stderr) == (0.1, 0.0)


def test_the_standard_error_of_a_ratio_is_the_jackknife_over_prompts() -> None:
    a, b = [3.0, 1.0, 4.0, 1.0, 5.0], [2.0, 7.0, 1.0, 8.0, 2.0]
    left_out = [(sum(a) - x) / (sum(b) - y) for x, y in zip(a, b, strict=True)]
    mean = sum(left_out) / 5
    twin = math.sqrt(4 / 5 * sum((x - mean) ** 2 for x in left_out))
    estimate = ratio_over_prompts(torch.tensor(a), torch.tensor(b))
    assert estimate.value == pytest.approx(14 / 20)
    assert estimate.stderr == pytest.approx(twin, rel=1e-12)


def test_shares_of_0_and_1_have_wilsons_interval() -> None:
    """Z² = 3.8415. For 20 of 20 the interval is 20/23.8415 to 1, for 0 of 10 it is 0 to 3.8415/13.8415."""
    assert share_over_prompts(torch.ones(20)).interval == (pytest.approx(0.83887, abs=1e-5), 1.0)
    assert share_over_prompts(torch.zeros(10)).interval == (0.0, pytest.approx(0.27754, abs=1e-5))
    low, high = share_over_prompts(torch.full((20,), 3.0), least=-1.0, most=3.0).bounds()
    assert (low, high) == (pytest.approx(-1 + 4 * 0.83887, abs=1e-4), 3.0)
    assert share_over_prompts(torch.ones(1)).interval is None


@pytest.mark.parametrize("values", [[1.0] * 9 + [0.0], [0.0, 0.25, 0.0, 0.0], [0.0, 1.0]], ids=str)
def test_a_share_whose_error_bar_leaves_0_to_1_gets_wilsons_interval(values: list[float]) -> None:
    share = share_over_prompts(torch.tensor(values))
    mean = mean_over_prompts(torch.tensor(values))
    assert (share.value, share.stderr) == (mean.value, mean.stderr)
    assert share.interval is not None
    quantile = mean.half_width() / mean.stderr
    draws = mean.value * (1 - mean.value) / mean.stderr**2
    for end in share.interval:
        assert 0 <= end <= 1
        assert (mean.value - end) ** 2 == pytest.approx(quantile**2 * end * (1 - end) / draws)


def test_an_interval_scales_with_the_range_of_its_values() -> None:
    share = torch.tensor([1.0] * 9 + [0.0])
    low, high = share_over_prompts(share).bounds()
    assert share_over_prompts(4.0 * share - 1.0, least=-1.0, most=3.0).bounds() == pytest.approx(
        (4 * low - 1, 4 * high - 1)
    )


def test_a_share_whose_error_bar_stays_within_0_to_1_keeps_it() -> None:
    share = share_over_prompts(torch.tensor([0.0, 1.0] * 10))
    assert share.interval is None
    assert share.bounds() == (share.value - share.half_width(), share.value + share.half_width())


def test_an_interval_of_a_range_with_an_infinite_end_is_students_cut_at_the_finite_end() -> None:
    values = torch.tensor([0.0, 0.0, 0.0, 5.0])
    high = mean_over_prompts(values).bounds()[1]
    assert share_over_prompts(values, 0.0, math.inf).bounds() == (0.0, high)
    assert share_over_prompts(-values, -math.inf, 0.0).bounds() == (-high, 0.0)
    assert share_over_prompts(values, -math.inf, math.inf).bounds() == mean_over_prompts(values).bounds()


def test_intervals_of_shares_near_1_cover_at_least_93_percent() -> None:
    """2000 evaluations of 20 prompts that are right with probability .95. Value ± t se would cover in 63 of 100."""
    draws = (torch.rand(2000, 20, generator=torch.Generator().manual_seed(0)) < 0.95).double()
    shares = [share_over_prompts(row) for row in draws]
    held = sum(low <= 0.95 <= high for low, high in (share.bounds() for share in shares))
    plain = sum(abs(share.value - 0.95) <= share.half_width() for share in shares)
    assert held / 2000 > 0.93
    assert plain / 2000 < 0.70
