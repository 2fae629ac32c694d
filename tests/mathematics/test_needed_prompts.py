"""How many prompts a step takes: by hand, and how often the interval holds the truth."""

from __future__ import annotations

import math
import random

import pytest

from rl_training.mathematics.needed_prompts import DECAY, LOST, NONE_YET, needed_prompts, square_and_variance
from rl_training.mathematics.running_pairs import RunningPair


def test_the_ratio_of_means_by_hand() -> None:
    """Squares of changes 5² − 3² = 16 and, a step later, 2² − 0 = 4, and variances of a prompt 6 and 10."""
    mean = RunningPair(0.5)
    assert needed_prompts(mean).reason == NONE_YET
    mean.add(square_and_variance(5.0, 3.0, 6.0, 7))
    mean.add(square_and_variance(2.0, 0.0, 10.0, 7))
    (square, variance), spread = mean.mean().values.tolist(), mean.mean().covariance
    assert (-square, variance) == pytest.approx(((0.5 * 16 + 4) / 1.5, 4 * (0.5 * 6 + 10) / 1.5))
    assert float(spread[0, 0]) == pytest.approx(0.25 * (2 * 81 + 4 * 16 * 9) / 1.5**2)


def test_changes_that_are_lost_in_their_errors_say_so() -> None:
    mean = RunningPair(DECAY)
    mean.add(square_and_variance(0.1, 1.0, 1.0, 7))
    assert needed_prompts(mean).reason == LOST


@pytest.mark.parametrize("prompts", [16, 64])
def test_its_interval_holds_the_truth(prompts: int) -> None:
    """Changes of either sign, with errors from 8 folds; a prompt's σ is 2.4 times their size: 23 prompts."""
    draw, held, lost, runs = random.Random(3), 0, 0, 300
    for _ in range(runs):
        mean = RunningPair(DECAY)
        for _ in range(20):
            change, stderr = draw.choice([1.0, -1.0]), 2.4 / math.sqrt(prompts)
            freedom = sum(draw.gauss(0, 1) ** 2 for _ in range(7)) / 7
            found = draw.gauss(change, stderr / math.sqrt(2))
            mean.add(square_and_variance(found, stderr / math.sqrt(2), (2.4**2) * freedom, 7))
        estimate = needed_prompts(mean)
        low, high = estimate.ends() if math.isfinite(estimate.value) else (-math.inf, math.inf)
        lost += math.isinf(high)
        held += low <= 4 * 2.4**2 <= high
    assert held / runs > 0.91
    assert lost / runs < 0.05
