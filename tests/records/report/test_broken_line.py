"""Claims on broken lines: compared with all ways to cut a series, and with noise of known size."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from rl_training.records.report.story.broken_line import BrokenLine, broken_line
from rl_training.records.report.story.noise import noise_of_mean
from rl_training.records.report.story.pieces import MIN_PIECE, PIECE, SLOPE, fit_pieces
from rl_training.records.table.trends import place_of_trailing


def series(values: np.ndarray) -> pd.Series:
    return pd.Series(values, index=range(1, len(values) + 1))


def fitted(values: np.ndarray) -> BrokenLine:
    line = broken_line(series(values))
    assert line is not None
    return line


def best_of_all(values: np.ndarray, noise: float) -> float:
    """Return the least cost over all ways to cut a series in pieces, each around its mean or around its line."""

    def cost(part: np.ndarray) -> float:
        x = np.arange(len(part))
        rests = [part - part.mean(), part - np.polyval(np.polyfit(x, part, 1), x)]
        level, line = (float(rest @ rest) / noise**2 for rest in rests)
        return PIECE + min(level, line + SLOPE)

    places, least = range(MIN_PIECE, len(values) - MIN_PIECE + 1), math.inf
    for number in range(len(values) // MIN_PIECE):
        for cuts in itertools.combinations(places, number):
            ends = [0, *cuts, len(values)]
            if all(end - start >= MIN_PIECE for start, end in itertools.pairwise(ends)):
                least = min(least, sum(cost(values[start:end]) for start, end in itertools.pairwise(ends)))
    return least


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_are_the_best_of_all_ways_to_cut(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = draw.normal(size=15) + np.where(np.arange(15) > 6, 4.0, 0.0) + 0.8 * np.arange(15) * (seed % 2)
    line, pieces = fit_pieces(values, 1.0)
    parts = [values[start:end] - line[start:end] for start, end in itertools.pairwise(pieces)]
    slopes = [np.ptp(line[start:end]) > 1e-9 for start, end in itertools.pairwise(pieces)]
    cost = sum(PIECE + SLOPE * slope + float(part @ part) for part, slope in zip(parts, slopes, strict=True))
    assert cost == pytest.approx(best_of_all(values, 1.0))


def correlated(rho: float, count: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed).normal(size=count + 50)
    for step in range(1, len(draw)):
        draw[step] = rho * draw[step - 1] + math.sqrt(1 - rho**2) * draw[step]
    return draw[50:]


@pytest.mark.parametrize(("rho", "most"), [(0.0, 10), (0.3, 25)])
def test_noise_alone_is_one_level_piece(rho: float, most: int) -> None:
    """Of 200 series of 40 values, at most 5 % are cut or sloped if white, and 12.5 % if their correlation is .3."""
    assert sum(np.ptp(fitted(correlated(rho, 40, seed)).fitted) > 1e-12 for seed in range(200)) <= most


def test_the_last_level_of_few_values_is_within_twice_its_error_in_nine_of_ten_series() -> None:
    """Of 500 series of 8 values of noise, whose size is estimated from six second differences."""
    lines = [fitted(correlated(0.0, 8, seed)) for seed in range(500)]
    assert sum(abs(line.now) <= 2 * line.now_error for line in lines) >= 450


@pytest.mark.parametrize("count", [5, 6, 7])
def test_the_error_of_five_to_seven_values_is_that_of_their_own_scatter(count: int) -> None:
    """Four of these six rewards happen to be near .48, and two at .59: their mean is not known to ± .004."""
    few = fitted(np.array([0.47422, 0.58031, 0.49125, 0.49078, 0.59594, 0.47484]))
    assert few.now_error > 0.02
    lines = [fitted(correlated(0.0, count, seed)) for seed in range(500)]
    assert sum(abs(line.now) <= 2 * line.now_error for line in lines) >= 450


def lately(values: np.ndarray) -> float:
    """Return the change over the last quarter."""
    line = fitted(values)
    return line.now - line.at(0.75)


def test_a_curve_that_has_levelled_off_is_seldom_drawn_as_one_line_up_to_its_end() -> None:
    """Of 8 (1 − exp(−4u)) plus noise of 1, the last quarter has .3; that of a straight line, 2, is kept."""
    u = np.arange(1, 25) / 24
    bent, straight = (
        sum(lately(curve + correlated(0.0, 24, seed)) > 1.0 for seed in range(100))
        for curve in (8 * (1 - np.exp(-4 * u)), 8 * u)
    )
    assert bent <= 27
    assert straight >= 88


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_the_noise_of_correlated_values_is_enlarged_whatever_the_trend(rho: float) -> None:
    """The variance of the mean of n values with the correlation ρ is σ²/n · (1 + ρ)/(1 − ρ)."""
    noises = [noise_of_mean(correlated(rho, 3000, seed) + 0.5 * np.arange(3000)) for seed in range(8)]
    assert np.mean(noises) == pytest.approx(math.sqrt((1 + rho) / (1 - rho)), rel=0.1)


def test_a_spike_is_no_piece() -> None:
    values = 0.1 * correlated(0.0, 40, 1)
    values[20] += 5.0
    assert np.ptp(fitted(values).fitted) == 0


def test_a_jump_is_found_where_it_is_and_pieces_grow_with_the_series() -> None:
    for times in (1, 50):
        values = np.repeat(np.where(np.arange(40) < 25, 1.0, 0.2), times) + 0.1 * correlated(0.0, 40 * times, 2)
        line = fitted(values)
        place = place_of_trailing(line.fitted < 0.6)
        assert place is not None
        assert line.step_of(place) == pytest.approx(25 * times + 1, abs=times)
        assert (line.start, line.now) == (pytest.approx(1.0, abs=0.08), pytest.approx(0.2, abs=0.08))


def test_a_line_has_the_slope_of_least_squares() -> None:
    values = 0.02 * np.arange(60) + 0.05 * correlated(0.0, 60, 3)
    line = fitted(values)
    change, _ = line.slope(0)
    assert change / 60 == pytest.approx(np.polyfit(np.arange(60), line.values, 1)[0])
    assert np.diff(line.fitted) == pytest.approx(change / 60)


def test_four_values_give_no_line() -> None:
    assert broken_line(series(np.arange(4.0))) is None
