"""Claims on the fit of R = −a e^H + b: exact on the curve, as scipy's regression in general, honest errors."""

from __future__ import annotations

import math
import random

import pytest
from scipy.stats import linregress

from rl_training.mathematics.reward_entropy import fit_reward_law

ENTROPIES = [0.9, 0.6, 0.45, 0.3, 0.2, 0.1]
NOISE = [0.01, -0.02, 0.005, 0.015, -0.01, 0.0]


def on_curve(a: float, b: float) -> list[float]:
    return [b - a * math.exp(entropy) for entropy in ENTROPIES]


def test_the_fit_and_its_errors_are_those_of_a_linear_regression_on_the_exponential() -> None:
    rewards = [reward + noise for reward, noise in zip(on_curve(0.4, 1.3), NOISE, strict=True)]
    law, line = fit_reward_law(ENTROPIES, rewards), linregress([math.exp(h) for h in ENTROPIES], rewards)
    assert (law.a.value, law.a.stderr) == pytest.approx((-line.slope, line.stderr))
    assert (law.b.value, law.b.stderr) == pytest.approx((line.intercept, line.intercept_stderr))
    mean = sum(map(math.exp, ENTROPIES)) / len(ENTROPIES)
    variance_at_mean = line.intercept_stderr**2 - (line.stderr * mean) ** 2
    for entropy in (-math.inf, 0.0, 0.4):
        x, found = math.exp(entropy), law.reward(entropy)
        assert found.value == pytest.approx(line.intercept + line.slope * x)
        assert found.stderr == pytest.approx(math.sqrt(variance_at_mean + (line.stderr * (x - mean)) ** 2))
        assert found.half_width() == pytest.approx(2.776445 * found.stderr)  # 97.5 % of Student's t, 4 degrees


def test_the_error_of_the_mean_miss_is_the_fits_and_that_of_the_new_points() -> None:
    """Rewards 1, 0, 0, 1 at e^H = 1, 2, 3, 4: a level line at ½, s² = ½, Sxx = 5. New ones, 1 and 2, at e^H = 5 and 7:
    their mean is 1 above, with s² (1/2 + 1/4 + (6 − 2.5)²/5) = 1.6.
    """
    law = fit_reward_law([math.log(x) for x in (1, 2, 3, 4)], [1, 0, 0, 1])
    miss = law.mean_miss([math.log(5), math.log(7)], [1, 2])
    assert miss.value == pytest.approx(1.0)
    assert miss.stderr == pytest.approx(math.sqrt(1.6))


def test_where_entropies_hardly_differ_the_fit_has_an_error() -> None:
    """Rewards 1, 0, 0, 1 at equal distances: s² = ½, and at the mean of e^H of four points the variance is s²/4."""
    for entropy in (1e-8, *ENTROPIES):
        law = fit_reward_law([entropy + step * 1e-9 for step in (-3, -1, 1, 3)], [1, 0, 0, 1])
        assert law.reward(entropy).stderr == pytest.approx(math.sqrt(0.5 / 4), rel=1e-3)


def test_the_ceilings_and_the_misss_intervals_hold_the_truth_in_95_of_100_cases() -> None:
    """2000 drawn samples: 95 % ± 1 %."""
    draw = random.Random(0)
    held = {"ceiling": 0, "miss": 0}
    later = [0.08, 0.06, 0.03]
    for _ in range(2000):
        law = fit_reward_law(ENTROPIES, [reward + draw.gauss(0, 0.02) for reward in on_curve(0.4, 1.3)])
        held["ceiling"] += abs(law.ceiling.value - 0.9) < law.ceiling.half_width()
        miss = law.mean_miss(later, [1.3 - 0.4 * math.exp(h) + draw.gauss(0, 0.02) for h in later])
        held["miss"] += abs(miss.value) < miss.half_width()
    assert all(abs(count / 2000 - 0.95) < 0.02 for count in held.values()), held


def test_too_few_points_or_one_entropy_are_refused() -> None:
    with pytest.raises(ValueError, match="3 points"):
        fit_reward_law([0.1, 0.2, 0.3], [1, 2, 3])
    with pytest.raises(ValueError, match="the entropy is the same at all points"):
        fit_reward_law([0.3] * 5, [1, 2, 3, 4, 5])
