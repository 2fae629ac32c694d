"""Averages over steps, of variances and of two estimates with their covariance: by hand, with gaps, and resumed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy.special import stdtrit
from torch import Tensor

from rl_training.statistics import noise_scale
from rl_training.statistics.running_pairs import Pair, RunningPair, RunningPairs
from rl_training.statistics.running_variance import RunningVariance


def variance_of(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_average_and_effective_batches_by_hand() -> None:
    """Variances 4, 1, 2 with weights ¼, ½, 1: (1 + .5 + 2) / 1.75 = 2, of 3.5² / (1 + .25 + 4) = 7/3 batches."""
    running = RunningVariance(decay=0.5)
    for step, value in enumerate((4.0, 1.0, 2.0)):
        average, batches = running.add(variance_of(value), step)
    assert float(average) == pytest.approx(2.0, rel=1e-12)
    assert float(batches) == pytest.approx(7 / 3, rel=1e-12)


def test_equal_variances_come_to_three_batches_and_one_large_one_to_one() -> None:
    running = RunningVariance(decay=0.5)
    for step in range(60):
        _, batches = running.add(variance_of(1.0), step)
    assert float(batches) == pytest.approx(3.0)
    assert float(running.add(variance_of(1e6), 60)[1]) == pytest.approx(1.0, abs=1e-4)


def test_a_hole_is_nan_there_and_not_counted_later() -> None:
    running, whole = RunningVariance(0.5), RunningVariance(0.5)
    first, hole = torch.tensor([3.0, 2.0]), torch.tensor([math.nan, 5.0])
    running.add(first, 1)
    average, _ = running.add(hole, 2)
    assert math.isnan(average[0])
    assert float(average[1]) == pytest.approx(6.0 / 1.5)
    # In the other entry the first one is two steps back, with nothing in between.
    after, _ = running.add(torch.tensor([1.0, 1.0]), 3)
    assert float(after[0]) == pytest.approx((0.25 * 3.0 + 1.0) / 1.25)
    whole.load_state_dict(running.state_dict())
    assert [t.tolist() for t in whole.add(first, 4)] == [t.tolist() for t in running.add(first, 4)]


def test_another_number_of_quantities_begins_anew() -> None:
    running = RunningVariance(0.5)
    running.add(torch.ones(2), 1)
    assert running.add(torch.full((3,), 4.0), 2)[0].tolist() == [4.0] * 3


def test_the_weight_of_a_step_falls_with_each_optimizer_step_measured_or_not() -> None:
    running, pairs = RunningVariance(0.5), RunningPair(0.5)
    for step, value in ((1, 4.0), (4, 2.0)):
        average, _ = running.add(variance_of(value), step)
        mean = pairs.add(pair(value, 0.0, 1.0), step)
    assert float(average) == pytest.approx((0.125 * 4.0 + 2.0) / 1.125)
    assert float(mean.values[0]) == pytest.approx((0.125 * 4.0 + 2.0) / 1.125)
    history = torch.tensor([[4.0, 4.0], [2.0, 2.0]], dtype=torch.float64)
    assert float(noise_scale.average(history, 0.5, torch.tensor([3, 0])).means[0]) == pytest.approx(2.5 / 1.125)


def test_dead_steps_say_nothing_about_the_noise_of_a_live_one() -> None:
    """Nothing has moved at them, or decay alone; the live one has its own variance, of one batch."""
    for dead in (0.0, 1e-7):
        running = RunningVariance(0.5)
        for step in range(3):
            running.add(variance_of(dead), step)
        assert [float(part) for part in running.add(variance_of(1.0), 3)] == [1.0, 1.0]
        assert float(running.add(variance_of(1.0), 4)[0]) == pytest.approx(1.0)
        # Of a dead one all count: a batch like the live ones would have moved something.
        assert float(running.add(variance_of(dead), 5)[0]) == pytest.approx(0.75 / sum(0.5**age for age in range(6)))


@pytest.mark.parametrize("num_folds", [4, 8])
@pytest.mark.parametrize(
    ("deviations", "least"),
    [
        ([0.0, 0.0, 0.0, *[1.0] * 6], 0.945),  # a dead start
        ([0.0, 1e-4, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0], 0.945),  # dead ones in between, and one of decay alone
        ([0.0, 0.5, 1.0, 1.0, 1.0, 1.0], 0.92),  # a warm-up: noise that doubles is not known at once
        ([1.0] * 6, 0.945),
    ],
)
def test_intervals_hold_the_truth_at_the_first_live_step_and_at_each_after_it(
    deviations: list[float], least: float, num_folds: int
) -> None:
    """Of 20 000 runs at once, each with a variance that a jackknife of so many folds would have found."""
    runs, degrees = 20_000, num_folds - 1
    generator = torch.Generator().manual_seed(0)
    running = RunningVariance(0.5)
    for step, deviation in enumerate(deviations):
        draws = torch.randn(runs, degrees + 1, generator=generator, dtype=torch.float64)
        error, variance = deviation * draws[:, 0], deviation**2 * draws[:, 1:].square().mean(dim=1)
        average, batches = running.add(variance, step)
        if deviation > 1e-2:
            quantiles = torch.from_numpy(stdtrit((degrees * batches).floor().numpy(), 0.975))
            covered = float((error.abs() <= quantiles * average.sqrt()).double().mean())
            assert least < covered < 0.985, (step, covered)


# --- means of two estimates with their covariance ---------------------------------------------------------------------


def pair(first: float, second: float, variance: float) -> Pair:
    covariance = torch.tensor([[variance, 0.0], [0.0, 1.0]], dtype=torch.float64)
    return Pair(torch.tensor([first, second], dtype=torch.float64), covariance, degrees=10.0)


def test_mean_its_variance_and_its_degrees_of_freedom_by_hand() -> None:
    """Weights .5 and 1, variances 4 and 1: the variance is (.25·4 + 1)/1.5², of 2²/((1² + 1²)/10) = 20 degrees."""
    running = RunningPair(decay=0.5)
    running.add(pair(3.0, 0.0, 4.0), 1)
    mean = running.add(pair(6.0, 3.0, 1.0), 2)
    assert mean.values.tolist() == pytest.approx([5.0, 2.0])
    assert float(mean.covariance[0, 0]) == pytest.approx(2 / 2.25)
    assert float(mean.covariance[1, 1]) == pytest.approx(1.25 / 2.25)
    assert mean.degrees == pytest.approx(20.0)


def test_one_step_has_the_degrees_of_its_folds_whatever_its_variance() -> None:
    """8 folds are 8 samples of an error bar, and not 7 where a quotient is rounded down."""
    for number in range(1, 50):
        single = dataclasses.replace(pair(3.0, 0.0, 0.1 * number), degrees=7.0)
        assert RunningPair(decay=0.9).add(single, number).estimate(0).num_samples == 8


def test_what_a_checkpoint_does_not_have_begins_anew() -> None:
    running = RunningPairs({"old": RunningPair(0.5), "new": RunningPair(0.5)})
    for mean in running.values():
        mean.add(pair(3.0, 0.0, 4.0), 1)
    state = running["old"].state
    running.load_state_dict({"old": state})
    assert (running["old"].steps, running["new"].steps) == (1, 0)
    assert running["new"].add(pair(6.0, 3.0, 1.0), 2).values.tolist() == [6.0, 3.0]
