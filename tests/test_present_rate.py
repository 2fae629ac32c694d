"""Where entropy would go at its present rate: worked by hand, against the rule written out, how often it is wrong."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.present_rate import down_to, half_of, is_below_within, present_rate, steps_left

ENTROPY = Estimate(1.0, 0.02, 32)


def test_it_is_as_worked_by_hand() -> None:
    """Rate −0.012 with error 0.001 of 8 folds: D(50) = 0.5 − 0.6 = −0.1, se² = 0.01² + 0.05², ν = 7.57 → 7."""
    rate = Estimate(-0.012, 0.001, 8)
    assert stats.t.ppf(0.975, 7) * math.sqrt(0.01**2 + 0.05**2) == pytest.approx(0.12057, abs=1e-5)
    assert not is_below_within(50, half_of(ENTROPY), rate)
    # D(60) = −0.22, se = √(0.01² + 0.06²) = 0.06083, × 2.3646 = 0.1438
    assert is_below_within(60, half_of(ENTROPY), rate)
    assert steps_left(half_of(ENTROPY), rate) == pytest.approx(0.5 / 0.012)


def test_a_level_is_reached_later_than_one_above_it() -> None:
    rate = Estimate(-0.012, 0.001, 8)
    assert [is_below_within(30, down_to(level, ENTROPY), rate) for level in (0.9, 0.8, 0.7, 0.5)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert steps_left(down_to(1.1, ENTROPY), rate) == 0
    assert steps_left(half_of(ENTROPY), Estimate(+0.001, 0.001, 8)) == math.inf


@pytest.mark.parametrize(
    ("entropy", "rate"),
    [
        (ENTROPY, Estimate(-0.1, num_samples=2, reason="no error bar")),
        (Estimate(1.0, num_samples=1, reason="no error bar"), Estimate(-0.1, 0.001, 8)),
        (ENTROPY, Estimate(+0.1, 0.001, 8)),
        (ENTROPY, Estimate.missing("not measured")),
    ],
)
def test_nothing_is_said_without_an_error_bar_or_at_a_rate_that_rises(entropy: Estimate, rate: Estimate) -> None:
    assert not is_below_within(100, half_of(entropy), rate)


def test_the_rate_has_the_larger_of_its_two_errors() -> None:
    alike = [Estimate(-0.01, 0.004, 8) for _ in range(4)]
    assert present_rate(alike) == Estimate(-0.01, 0.002, 8, "a step has no error bar")
    spread = [Estimate(value, 1e-6, 8) for value in (-0.03, -0.01, 0.01, -0.01)]
    between = present_rate(spread)
    assert (between.value, between.num_samples) == (pytest.approx(-0.01), 4)
    assert between.stderr == pytest.approx(math.sqrt((0.02**2 + 0.02**2) / 3 / 4))
    assert present_rate(alike[:1]).stderr == 0.004
    assert math.isnan(present_rate([*alike, Estimate(0.0, reason="no error bar")]).stderr)
    assert math.isnan(present_rate([]).value)


def test_of_a_straight_line_at_the_very_border_it_is_wrong_in_no_more_than_the_2_5_percent_it_allows() -> None:
    """The truth is gone in exactly n steps, so that every alert is false; of 2000, 50 ± 14 (two sigma) may be."""
    rng, false = random.Random(0), 0
    for _ in range(2000):
        changes = [Estimate(rng.gauss(-0.01, 0.006), 0.006, 16) for _ in range(10)]
        level = Estimate(rng.gauss(1.0, 0.03), 0.03, 32)
        false += is_below_within(50, half_of(level), present_rate(changes))
    assert false <= 64
