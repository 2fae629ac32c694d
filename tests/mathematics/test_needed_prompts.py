"""How many prompts a step takes: by hand, and how often the interval holds the truth."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from rl_training.mathematics.needed_prompts import LOST, NONE_YET, NeededPrompts, change_and_noise, on_log_scale
from rl_training.mathematics.running_pairs import Pair

NONE = math.nan


def test_sums_over_steps_by_hand(monkeypatch) -> None:
    """Trapezoids −3, −2, −3, −4 with variances 1, ¼, ⅕, ⅕ µ; the third counts over 1, the fourth over (.7 + ¼)/1.7."""
    monkeypatch.setattr("rl_training.mathematics.needed_prompts.FEWEST_STEPS", 1)
    needed = NeededPrompts()
    batches = [
        ((-2.0, NONE), (1e-6, NONE)),
        ((-1.0, -4.0), (0.4e-6, 3e-6)),
        ((-1.0, -3.0), (0.2e-6, 0.6e-6)),
        ((-4.0, -5.0), (0.2e-6, 0.6e-6)),
        ((0.0, -4.0), (1e-6, 0.6e-6)),
    ]
    found = [needed.add(values, variances, 2, 7) for values, variances in batches]
    assert [one.reason for one in found[:3]] == [NONE_YET] * 3
    assert found[3].value == pytest.approx(8 * 2 * 0.2e-6 / 9)
    scale = (0.7 + 0.25) / 1.7
    assert found[4].value == pytest.approx(8 * 2 * 0.2e-6 * (0.9 + 1 / scale) / (0.9 * 9 + 16 / scale))


def test_the_covariance_by_hand() -> None:
    """Δ² = 16 with a variance of 9: twice 2·9² + 4·16·9 and twice 10·9²/8, which 4σ² = 8·2·9 has 16-fold."""
    pair = change_and_noise(5.0, 9.0, 2, 8)
    assert pair.values.tolist() == [-16.0, 144.0]
    spread, noise = 2 * 81 + 4 * 16 * 9, 10 * 81 / 8
    assert pair.covariance.flatten().tolist() == pytest.approx(
        [2 * (spread + noise), 2 * 16 * noise, 2 * 16 * noise, 2 * 256 * noise]
    )


def test_a_batch_without_a_change_leaves_out_both_of_its_steps() -> None:
    rng = random.Random(0)
    batches = [(rng.gauss(5, 1), rng.gauss(5, 1)) for _ in range(9)]
    whole, holed = NeededPrompts(), NeededPrompts()
    for number, values in enumerate(batches):
        whole.add(values, (1.0, 1.0), 8, 7)
        holed.add((NONE, NONE) if number == 5 else values, (1.0, 1.0), 8, 7)
    assert whole.state[-1] == 6
    assert holed.state[-1] == 4
    assert holed.state.isfinite().all()


def test_changes_that_are_lost_in_their_errors_say_so() -> None:
    needed = NeededPrompts()
    found = [needed.add((0.1, -0.1), (1.0, 1.0), 8, 7).reason for _ in range(8)]
    assert found == [NONE_YET] * 7 + [LOST]  # of the first batch none is closed, and two are the first scale


def test_the_interval_is_of_the_logarithm_and_has_a_lower_end_alone_where_the_change_may_be_none() -> None:
    """4σ² = 24 ± 3 and Δ² = 4 ± 1, 1/4 and 1/8 of them: 5/64 together. Then Δ² = 1 ± 1: at most 2.96."""
    covariance = torch.tensor([[1.0, 0.0], [0.0, 9.0]], dtype=torch.float64)
    found = on_log_scale(Pair(torch.tensor([-4.0, 24.0], dtype=torch.float64), covariance, 1e9))
    factor = math.exp(1.959964 * math.sqrt(5) / 8)
    assert (found.value, *found.ends()) == pytest.approx((6.0, 6.0 / factor, 6.0 * factor))
    found = on_log_scale(Pair(torch.tensor([-1.0, 24.0], dtype=torch.float64), covariance, 1e9))
    assert found.reason == LOST
    assert found.ends() == pytest.approx((24.0 * math.exp(-1.959964 / 8) / 2.959964, math.inf))
    needed = NeededPrompts()
    for sign in [1.0, -1.0] * 10:
        found = needed.add((sign, sign), (1.0, 1.0), 8, 7)
    assert math.isnan(found.value)
    assert 0 < found.ends()[0] < math.inf == found.ends()[1]


@pytest.mark.parametrize("rare", [False, True])
def test_its_interval_holds_the_truth(rare: bool) -> None:
    """32 prompts in 8 folds, noise that neighbouring steps share, which falls to a third; 23 prompts are needed.

    Where they are rare, one prompt in 16 has most of the variance.
    """
    draw, held, lost, ratios, runs = random.Random(3), 0, 0, [], 200
    for _ in range(runs):
        needed, last = NeededPrompts(), 0.0
        for step in range(20):
            size = math.exp(-step / 6) + 0.15
            tails = [(4.0 if draw.random() < 1 / 16 else 0.3) if rare else 1.0 for _ in range(32)]
            norm = math.sqrt((16 + 15 * 0.09) / 16) if rare else 1.0
            products = [2.4 * tail * draw.gauss(0, 1) / norm - 1.0 for tail in tails]
            means = [statistics.fmean(products[start : start + 4]) for start in range(0, 32, 4)]
            mean, variance = statistics.fmean(means), statistics.variance(means) / 8
            found = needed.add((size * mean, last * mean), (size**2 * variance, last**2 * variance), 32, 7)
            last = size
        low, high = found.ends()
        lost += math.isinf(high)
        held += low <= 4 * 2.4**2 <= high
        ratios += [found.value / (4 * 2.4**2)] * math.isfinite(found.value)
    assert held / runs > 0.9
    assert lost / runs < 0.05
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.15)
