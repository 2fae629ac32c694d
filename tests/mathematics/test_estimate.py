"""Claims on the estimate: nan says why, intervals are Student's, nothing is clamped."""

import dataclasses
import math

import pytest

from rl_training.mathematics.estimate import Estimate


def test_nan_without_a_reason_raises() -> None:
    with pytest.raises(ValueError, match="must say why"):
        Estimate(math.nan)
    with pytest.raises(ValueError, match="must say why"):
        Estimate(math.nan, stderr=0.1, num_samples=8)


def test_missing_is_nan_with_its_reason() -> None:
    estimate = Estimate.missing("there is only one block")
    assert math.isnan(estimate.value)
    assert math.isnan(estimate.stderr)
    assert estimate.reason == "there is only one block"


@pytest.mark.parametrize(
    ("num_samples", "coverage", "quantile"),
    [  # two-sided quantiles of Student's t as printed in tables
        (2, 0.95, 12.706),
        (8, 0.95, 2.365),
        (16, 0.95, 2.131),
        (32, 0.95, 2.040),
        (8, 0.99, 3.499),
        (8, 0.90, 1.895),
        (2, 0.50, 1.000),
    ],
)
def test_half_width_is_the_tabulated_student_t_quantile(num_samples: int, coverage: float, quantile: float) -> None:
    assert Estimate(0.3, 1.0, num_samples).half_width(coverage) == pytest.approx(quantile, abs=5e-4)
    assert Estimate(-0.3, 0.02, num_samples).half_width(coverage) == pytest.approx(0.02 * quantile, abs=1e-5)


def test_half_width_covers_95_percent_unless_told() -> None:
    assert Estimate(0.0, 2.0, 8).half_width() == pytest.approx(2 * 2.365, abs=1e-3)


def test_half_width_is_nan_without_a_standard_error() -> None:
    assert math.isnan(Estimate(0.3, num_samples=8).half_width())
    assert math.isnan(Estimate.missing("no").half_width())


@pytest.mark.parametrize("num_samples", [0, 1])
def test_half_width_is_nan_without_a_degree_of_freedom(num_samples: int) -> None:
    assert math.isnan(Estimate(0.3, 0.1, num_samples).half_width())


@pytest.mark.parametrize("value", [-3.2, 0.0, -1e-300, 1e300, -math.inf])
def test_value_is_kept_as_it_is(value: float) -> None:
    assert Estimate(value, 0.0, 8).value == value


def test_estimate_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Estimate(1.0).value = 2.0
