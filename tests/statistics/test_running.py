"""Averages over steps of variances, and of two estimates with covariance: by hand, with gaps, and resumed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from scipy.special import stdtrit
from torch import Tensor

from rl_training.probes.gns import CHANNELS, NoiseHistory
from rl_training.statistics import noise_scale
from rl_training.statistics.estimate import NOT_FINITE_GRADIENT
from rl_training.statistics.running_pairs import Pair, RunningPair
from rl_training.statistics.running_variance import RunningVariance


def variance_of(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def averages(values: Sequence[Tensor], decay: float = 0.5, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return the average and its effective batches after each of several consecutive steps."""
    running, said = RunningVariance(), []
    for step, value in enumerate(values, start=first):
        running = running.add(value, step, decay)
        said.append(running.average(decay))
    return said


def test_average_and_effective_batches_equal_those_by_hand() -> None:
    """Variances 4, 1, 2 with weights ¼, ½, 1: (1 + .5 + 2) / 1.75 = 2, from 3.5² / (1 + .25 + 4) = 7/3 batches."""
    average, batches = averages([variance_of(value) for value in (4.0, 1.0, 2.0)])[-1]
    assert float(average) == pytest.approx(2.0, rel=1e-12)
    assert float(batches) == pytest.approx(7 / 3, rel=1e-12)


def test_equal_variances_count_as_three_batches_and_a_dominant_one_as_one() -> None:
    said = averages([variance_of(1.0)] * 60 + [variance_of(1e6)])
    assert float(said[59][1]) == pytest.approx(3.0)
    assert float(said[60][1]) == pytest.approx(1.0, abs=1e-4)


def test_a_missing_step_is_nan_and_not_counted_later() -> None:
    first, hole = torch.tensor([3.0, 2.0]), torch.tensor([math.nan, 5.0])
    _, (average, _), (after, _) = averages([first, hole, torch.tensor([1.0, 1.0])])
    assert math.isnan(average[0])
    assert float(average[1]) == pytest.approx(6.0 / 1.5)
    # In the other entry, the first variance is two steps back and nothing is between.
    assert float(after[0]) == pytest.approx((0.25 * 3.0 + 1.0) / 1.25)


def test_adding_a_step_does_not_modify_the_old_state() -> None:
    before = RunningVariance().add(variance_of(4.0), 1, 0.5)
    before.add(variance_of(1.0), 2, 0.5)
    assert float(before.average(0.5)[0]) == 4.0
    mean = RunningPair().add(pair(4.0, 0.0, 1.0), 1, 0.5)
    mean.add(pair(1.0, 0.0, 1.0), 2, 0.5)
    assert float(mean.mean().values[0]) == 4.0


def test_another_number_of_quantities_starts_a_new_average() -> None:
    running = RunningVariance().add(torch.ones(2), 1, 0.5)
    assert running.add(torch.full((3,), 4.0), 2, 0.5).average(0.5)[0].tolist() == [4.0] * 3


def test_the_weight_of_a_step_decays_with_every_optimizer_step_measured_or_not() -> None:
    running, pairs = RunningVariance(), RunningPair()
    for step, value in ((1, 4.0), (4, 2.0)):
        running = running.add(variance_of(value), step, 0.5)
        pairs = pairs.add(pair(value, 0.0, 1.0), step, 0.5)
    assert float(running.average(0.5)[0]) == pytest.approx((0.125 * 4.0 + 2.0) / 1.125)
    assert float(pairs.mean().values[0]) == pytest.approx((0.125 * 4.0 + 2.0) / 1.125)
    history = torch.tensor([[4.0, 4.0], [2.0, 2.0]], dtype=torch.float64)
    assert float(noise_scale.average(history, 0.5, torch.tensor([3, 0])).means[0]) == pytest.approx(2.5 / 1.125)


def test_a_step_that_is_taken_again_counts_once_and_restarted_numbers_begin_anew() -> None:
    """Steps 1, 2, 3 and 3 again: (¼ · 4 + ½ · 8 + 2) / 1.75 = 4. After step 10 000, numbers restart at 1."""
    repeated, restarted = [(1, 4.0), (2, 8.0), (3, 100.0), (3, 2.0)], [(9_999, 4.0), (10_000, 8.0), (1, 2.0), (2, 5.0)]
    for taken, mean, count in ((repeated, 4.0, 3), (restarted, 4.0, 2)):
        variances, pairs, history = RunningVariance(), RunningPair(), NoiseHistory()
        for step, value in taken:
            variances = variances.add(variance_of(value), step, 0.5)
            pairs = pairs.add(pair(value, 0.0, 1.0), step, 0.5)
            history = history.add(torch.full((len(CHANNELS), 2), value, dtype=torch.float64), step, 0.5)
        noise = noise_scale.average(history.moments[:, 0], 0.5, step - history.steps)
        assert [float(variances.average(0.5)[0]), float(noise.means[0])] == pytest.approx([mean, mean])
        assert float(pairs.mean().values[0]) == pytest.approx(mean)
        assert (pairs.num_steps, len(variances.steps), len(history.steps)) == (count, count, count)


def test_steps_that_move_nothing_do_not_lower_the_variance_of_others() -> None:
    """Nothing moves at a dead step, or only weight decay. The first live step has its own variance, from one batch."""
    for dead in (0.0, 1e-7):
        said = averages([variance_of(value) for value in (dead, dead, dead, 1.0, 1.0, dead)])
        assert [float(part) for part in said[3]] == [1.0, 1.0]
        assert float(said[4][0]) == pytest.approx(1.0)
        # At a dead step all steps count, because a batch like the live ones would have moved something.
        assert float(said[5][0]) == pytest.approx(0.75 / sum(0.5**age for age in range(6)))


@pytest.mark.parametrize("num_folds", [4, 8])
@pytest.mark.parametrize(
    ("deviations", "least"),
    [
        ([0.0, 0.0, 0.0, *[1.0] * 6], 0.945),  # a dead start
        ([0.0, 1e-4, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0], 0.945),  # dead steps in between, and one of pure decay
        ([0.0, 0.5, 1.0, 1.0, 1.0, 1.0], 0.92),  # a warm-up: noise that doubles is not noticed at once
        ([1.0] * 6, 0.945),
    ],
)
def test_intervals_cover_from_the_first_step_that_moves_weights(
    deviations: list[float], least: float, num_folds: int
) -> None:
    """20 000 runs at once, each with the variance that a jackknife over `num_folds` folds would give."""
    runs, degrees = 20_000, num_folds - 1
    generator = torch.Generator().manual_seed(0)
    running = RunningVariance()
    for step, deviation in enumerate(deviations):
        draws = torch.randn(runs, degrees + 1, generator=generator, dtype=torch.float64)
        error, variance = deviation * draws[:, 0], deviation**2 * draws[:, 1:].square().mean(dim=1)
        running = running.add(variance, step, 0.5)
        average, batches = running.average(0.5)
        if deviation > 1e-2:
            quantiles = torch.from_numpy(stdtrit((degrees * batches).floor().numpy(), 0.975))
            covered = float((error.abs() <= quantiles * average.sqrt()).double().mean())
            assert least < covered < 0.985, (step, covered)


# --- means of two estimates with their covariance ---------------------------------------------------------------------


def pair(first: float, second: float, variance: float) -> Pair:
    covariance = torch.tensor([[variance, 0.0], [0.0, 1.0]], dtype=torch.float64)
    return Pair(torch.tensor([first, second], dtype=torch.float64), covariance, degrees=10.0)


def test_mean_variance_and_degrees_of_freedom_equal_those_by_hand() -> None:
    """Weights .5 and 1, variances 4 and 1: the variance is (.25·4 + 1)/1.5², with 2²/((1² + 1²)/10) = 20 degrees."""
    mean = RunningPair().add(pair(3.0, 0.0, 4.0), 1, 0.5).add(pair(6.0, 3.0, 1.0), 2, 0.5).mean()
    assert mean.values.tolist() == pytest.approx([5.0, 2.0])
    assert float(mean.covariance[0, 0]) == pytest.approx(2 / 2.25)
    assert float(mean.covariance[1, 1]) == pytest.approx(1.25 / 2.25)
    assert mean.degrees == pytest.approx(20.0)


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_a_second_estimate_that_is_missing_once_leaves_its_mean_to_the_other_steps(missing: float) -> None:
    """Weights ¼, ½ and 1, the second known at the last two: (½·6 + 3)/1.5 = 4, with the variance (¼ + 1)/1.5²."""
    running = RunningPair().add(pair(3.0, missing, 4.0), 1, 0.5)
    alone = running.mean()
    assert math.isnan(float(alone.values[1]))
    assert alone.minus_ratio("the first may be 0").reason == NOT_FINITE_GRADIENT
    for step, second in ((2, 6.0), (3, 3.0)):
        running = running.add(pair(3.0, second, 4.0), step, 0.5)
    mean = running.mean()
    assert mean.values.tolist() == pytest.approx([3.0, 4.0])
    assert float(mean.covariance[0, 0]) == pytest.approx(4 * (0.0625 + 0.25 + 1) / 1.75**2)
    assert float(mean.covariance[1, 1]) == pytest.approx(1.25 / 1.5**2)
    assert running.num_steps == 3


def test_one_step_has_the_degrees_of_freedom_of_its_folds() -> None:
    """8 folds are 8 samples of an error bar. Rounding a quotient down must not make them 7."""
    for number in range(1, 50):
        single = dataclasses.replace(pair(3.0, 0.0, 0.1 * number), degrees=7.0)
        assert RunningPair().add(single, number, 0.9).mean().estimate(0).num_samples == 8
