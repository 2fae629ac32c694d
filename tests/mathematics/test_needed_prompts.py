"""How many prompts a step takes: by hand, and how often the interval holds the truth."""

from __future__ import annotations

import math
import random

import pytest

from rl_training.mathematics.needed_prompts import DECAY, LOST, NONE_YET, needed_prompts, signal_to_noise
from rl_training.mathematics.running_pairs import RunningPair


def test_the_inverse_of_the_mean_ratio_by_hand() -> None:
    """Squares of changes 5² − 3² = 16 and, a step later, 2² − 0 = 4; variances 6 and 10, from 8 degrees: × 6/8."""
    mean = RunningPair(0.5)
    assert needed_prompts(mean).reason == NONE_YET
    mean.add(signal_to_noise(5.0, 3.0, 6.0, 8))
    first = mean.mean().covariance[0, 0]
    mean.add(signal_to_noise(2.0, 0.0, 10.0, 8))
    ratios = 16 / 6 * 6 / 8 / 4, 4 / 10 * 6 / 8 / 4
    assert float(mean.mean().values[0]) == pytest.approx(-(0.5 * ratios[0] + ratios[1]) / 1.5)
    assert float(first) == pytest.approx((2 * 81 + 4 * 16 * 9) / (4 * 6 * 8 / 6) ** 2 + ratios[0] ** 2 / 2)


def test_changes_that_are_lost_in_their_errors_say_so() -> None:
    mean = RunningPair(DECAY)
    mean.add(signal_to_noise(0.1, 1.0, 1.0, 7))
    assert needed_prompts(mean).reason == LOST


@pytest.mark.parametrize("prompts", [16, 64])
def test_its_interval_holds_the_truth(prompts: int) -> None:
    """Changes of either sign, errors of 21 degrees of freedom, a prompt's σ 2.4 times the changes: 23 prompts."""
    draw, held, lost, runs = random.Random(3), 0, 0, 300
    for _ in range(runs):
        mean = RunningPair(DECAY)
        for _ in range(20):
            change, stderr = draw.choice([1.0, -1.0]), 2.4 / math.sqrt(prompts)
            scatter = sum(draw.gauss(0, 1) ** 2 for _ in range(21)) / 21
            found = draw.gauss(change, stderr / math.sqrt(2))
            mean.add(signal_to_noise(found, stderr / math.sqrt(2), 2.4**2 * scatter, 21))
        estimate = needed_prompts(mean)
        low, high = estimate.ends() if math.isfinite(estimate.value) else (-math.inf, math.inf)
        lost += math.isinf(high)
        held += low <= 4 * 2.4**2 <= high
    assert held / runs > 0.91
    assert lost / runs < 0.05
