"""Averages over steps, of variances and of two estimates with their covariance: by hand, with gaps, and resumed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rl_training.mathematics.running_pairs import Pair, RunningPair, RunningPairs
from rl_training.mathematics.running_variance import RunningVariance


def test_average_and_effective_batches_by_hand() -> None:
    """Variances 4, 1, 2 with weights ¼, ½, 1: (1 + .5 + 2) / 1.75 = 2, of 3.5² / (1 + .25 + 4) = 7/3 batches."""
    running = RunningVariance(decay=0.5)
    for value in (4.0, 1.0, 2.0):
        average, batches = running.add(torch.tensor([value], dtype=torch.float64))
    assert float(average) == pytest.approx(2.0, rel=1e-12)
    assert float(batches) == pytest.approx(7 / 3, rel=1e-12)


def test_equal_variances_come_to_three_batches_and_one_large_one_to_one() -> None:
    running = RunningVariance(decay=0.5)
    for _ in range(60):
        _, batches = running.add(torch.ones(1, dtype=torch.float64))
    assert float(batches) == pytest.approx(3.0)
    assert float(running.add(torch.tensor([1e6], dtype=torch.float64))[1]) == pytest.approx(1.0, abs=1e-4)


def test_a_hole_is_nan_there_and_not_counted_later() -> None:
    running, whole = RunningVariance(0.5), RunningVariance(0.5)
    first, hole = torch.tensor([3.0, 2.0]), torch.tensor([math.nan, 5.0])
    running.add(first)
    average, _ = running.add(hole)
    assert math.isnan(average[0])
    assert float(average[1]) == pytest.approx(6.0 / 1.5)
    # In the other entry the first one is two steps back, with nothing in between.
    after, _ = running.add(torch.tensor([1.0, 1.0]))
    assert float(after[0]) == pytest.approx((0.25 * 3.0 + 1.0) / 1.25)
    whole.load_state_dict(running.state_dict())
    assert [t.tolist() for t in whole.add(first)] == [t.tolist() for t in running.add(first)]


def test_another_number_of_quantities_begins_anew() -> None:
    running = RunningVariance(0.5)
    running.add(torch.ones(2))
    assert running.add(torch.full((3,), 4.0))[0].tolist() == [4.0] * 3


# --- means of two estimates with their covariance ---------------------------------------------------------------------


def pair(first: float, second: float, variance: float) -> Pair:
    covariance = torch.tensor([[variance, 0.0], [0.0, 1.0]], dtype=torch.float64)
    return Pair(torch.tensor([first, second], dtype=torch.float64), covariance, degrees=10.0)


def test_mean_its_variance_and_its_degrees_of_freedom_by_hand() -> None:
    """Weights .5 and 1, variances 4 and 1: the variance is (.25·4 + 1)/1.5², of 2²/((1² + 1²)/10) = 20 degrees."""
    running = RunningPair(decay=0.5)
    running.add(pair(3.0, 0.0, 4.0))
    mean = running.add(pair(6.0, 3.0, 1.0))
    assert mean.values.tolist() == pytest.approx([5.0, 2.0])
    assert float(mean.covariance[0, 0]) == pytest.approx(2 / 2.25)
    assert float(mean.covariance[1, 1]) == pytest.approx(1.25 / 2.25)
    assert mean.degrees == pytest.approx(20.0)


def test_one_step_has_the_degrees_of_its_folds_whatever_its_variance() -> None:
    """8 folds are 8 samples of an error bar, and not 7 where a quotient is rounded down."""
    for number in range(1, 50):
        one = dataclasses.replace(pair(3.0, 0.0, 0.1 * number), degrees=7.0)
        assert RunningPair(decay=0.9).add(one).estimate(0).num_samples == 8


def test_what_a_checkpoint_does_not_have_begins_anew() -> None:
    running = RunningPairs({"old": RunningPair(0.5), "new": RunningPair(0.5)})
    for mean in running.values():
        mean.add(pair(3.0, 0.0, 4.0))
    kept = running["old"].state
    running.load_state_dict({"old": kept})
    assert (running["old"].steps, running["new"].steps) == (1, 0)
    assert running["new"].add(pair(6.0, 3.0, 1.0)).values.tolist() == [6.0, 3.0]
