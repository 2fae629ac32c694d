"""Calibration of predictions: closed forms, simulated truths, and its reasons if there is too little data."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import reference

from rl_training.statistics.calibration import MIN_PAIRS, calibration, interval_covers
from rl_training.statistics.estimate import Estimate

Pair = tuple[float, float, int, float, float]
NAMES = {"slope", "slope_corrected", "correlation", "sign_agreement", "coverage"}


def as_estimates(pairs: list[Pair]) -> list[tuple[Estimate, Estimate]]:
    return [(Estimate(p, s, n), Estimate(t, tau, 512)) for p, s, n, t, tau in pairs]


def calibrated(pairs: list[Pair]) -> dict[str, Estimate]:
    return calibration(as_estimates(pairs))


def random_pairs(count: int, seed: int) -> list[Pair]:
    rng = random.Random(seed)
    return [
        (rng.gauss(0.1, 1), rng.uniform(0.1, 0.5), 8, rng.gauss(0.2, 1), rng.uniform(0.1, 0.5)) for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_calibration_values_equal_the_textbook_formulas(seed: int) -> None:
    pairs = random_pairs(11, seed)
    answers = calibrated(pairs)
    p, s, _, t, tau = (list(column) for column in zip(*pairs, strict=True))
    products = [a * b for a, b in zip(p, t, strict=True)]
    assert answers["slope"].value == pytest.approx(sum(products) / sum(x * x for x in p))
    assert answers["slope_corrected"].value == pytest.approx(
        sum(products) / sum(x * x - y * y for x, y in zip(p, s, strict=True))
    )
    assert answers["correlation"].value == pytest.approx(statistics.correlation(p, t))
    assert answers["sign_agreement"].value == pytest.approx(sum(x > 0 for x in products) / 11)
    covered = [interval_covers(a - b, c, 8, d) for a, b, c, d in zip(p, t, s, tau, strict=True)]
    assert answers["coverage"].value == pytest.approx(sum(covered) / 11)


def test_calibration_errors_are_the_jackknife_over_pairs() -> None:
    pairs = random_pairs(12, seed=7)
    answers = calibrated(pairs)
    slope = reference.jackknife_stderr(lambda s: s[0] / s[1], [[p * t, p * p] for p, _, _, t, _ in pairs])
    assert answers["slope"].stderr == pytest.approx(slope, rel=1e-9)
    correlations = [
        statistics.correlation(*zip(*[(p, t) for p, _, _, t, _ in pairs[:i] + pairs[i + 1 :]], strict=True))
        for i in range(12)
    ]
    expected = math.sqrt(11) * statistics.pstdev(correlations)
    assert answers["correlation"].stderr == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("truth_stderr", [0.0, 0.5])
def test_honest_error_bars_cover_95_percent_even_with_few_samples(truth_stderr: float) -> None:
    rng = random.Random(2)
    pairs = []
    for _ in range(4000):
        noise = [rng.gauss(0, 1) for _ in range(8)]
        mean, stderr = statistics.mean(noise), statistics.stdev(noise) / math.sqrt(8)
        pairs.append((5 + mean, stderr, 8, 5 + rng.gauss(0, truth_stderr), truth_stderr))
    coverage = calibrated(pairs)["coverage"]
    assert abs(coverage.value - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)
    assert coverage.stderr == pytest.approx(math.sqrt(coverage.value * (1 - coverage.value) / 3999), rel=1e-6)


def test_the_interval_is_student_t_for_an_exact_truth_and_normal_for_an_exact_prediction() -> None:
    edge = 2.776445  # Student's t with 4 degrees of freedom, 97.5 %
    assert interval_covers(edge * 0.999, 1.0, 5, 0.0) == 1
    assert interval_covers(-edge * 1.001, 1.0, 5, 0.0) == 0
    assert interval_covers(1.959, 0.0, 5, 1.0) == 1
    assert interval_covers(1.961, 0.0, 5, 1.0) == 0
    assert math.isnan(interval_covers(0.0, math.nan, 0, 1.0))


def test_the_interval_with_two_errors_has_welchs_degrees_of_freedom() -> None:
    """Errors 1 and 1, the first with 4 degrees of freedom, give (1² + 1²)² / (1⁴/4) = 16."""
    edge = 2.119905 * math.sqrt(2)  # Student's t with 16 degrees of freedom, 97.5 %
    assert interval_covers(edge * 0.999, 1.0, 5, 1.0) == 1
    assert interval_covers(edge * 1.001, 1.0, 5, 1.0) == 0


def test_too_few_pairs_give_nan_with_the_number_needed() -> None:
    for count in (0, MIN_PAIRS - 1):
        answers = calibrated(random_pairs(count, seed=3))
        assert answers.keys() == NAMES
        for answer in answers.values():
            assert math.isnan(answer.value)
            assert answer.code == "few_pairs"
            assert answer.num_samples == count


def test_a_pair_with_a_missing_side_is_left_out() -> None:
    pairs, missing = as_estimates(random_pairs(8, seed=4)), Estimate.missing("not measured")
    halves = [(missing, Estimate(1.0, 0.1, 512)), (Estimate(1.0, 0.1, 8), missing)]
    assert calibration([*pairs, *halves]) == calibration(pairs)


def test_without_error_bars_there_is_a_slope_but_no_coverage() -> None:
    answers = calibrated([(x, math.nan, 4, x, 0.1) for x in range(1, 10)])
    assert answers["slope"].value == pytest.approx(1)
    assert math.isnan(answers["coverage"].value)
    assert (answers["coverage"].code, answers["coverage"].num_samples) == ("few_pairs", 0)


def test_undefined_calibration_values_are_nan_with_their_reason() -> None:
    equal = calibrated([(0.1, 5.0, 8, float(x), 0.1) for x in range(9)])
    assert equal["correlation"].code == "no_spread"
    assert math.isnan(equal["correlation"].value)
    assert equal["slope_corrected"].code == "predictions_lost_in_noise"
    assert math.isnan(equal["slope_corrected"].value)
    zero = calibrated([(0.0, 1.0, 8, 1.0, 0.1)] * 9)
    assert math.isnan(zero["slope"].value)
    assert zero["slope"].code == "all_zero"
