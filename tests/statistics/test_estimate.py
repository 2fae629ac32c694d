"""Claims on Estimate: nan has a reason, and intervals are Student's."""

import math

import pytest
import torch

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import FEW_FOLDS, NONE_WITHOUT, estimates_over_units
from rl_training.statistics.unavailable import Unavailable
from rl_training.statistics.welch import samples_of_sum


def test_nan_without_a_reason_raises() -> None:
    with pytest.raises(ValueError, match="`reason`"):
        Estimate(math.nan)
    with pytest.raises(ValueError, match="`reason`"):
        Estimate(math.nan, stderr=0.1, num_samples=8)


def test_an_estimate_from_a_single_nonzero_unit_has_no_error_but_a_reason() -> None:
    by_unit = torch.tensor([[3.0, 2.0], *[[0.0, 0.0]] * 7], dtype=torch.float64)
    (estimate,) = estimates_over_units(["ratio"], lambda sums: sums[..., :1] / sums[..., 1:], by_unit).values()
    assert estimate.value == 1.5
    assert math.isnan(estimate.stderr)
    assert estimate.reason == NONE_WITHOUT


def test_a_missing_estimate_is_nan_with_its_reason() -> None:
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
def test_the_half_width_is_the_tabulated_student_t_quantile(num_samples: int, coverage: float, quantile: float) -> None:
    assert Estimate(0.3, 1.0, num_samples).half_width(coverage) == pytest.approx(quantile, abs=5e-4)
    assert Estimate(-0.3, 0.02, num_samples).half_width(coverage) == pytest.approx(0.02 * quantile, abs=1e-5)


@pytest.mark.parametrize("estimate", [Estimate(0.3, num_samples=8), Estimate.missing("no"), Estimate(0.3, 0.1, 1)])
def test_the_half_width_is_nan_without_a_standard_error_or_a_degree_of_freedom(estimate: Estimate) -> None:
    assert math.isnan(estimate.half_width())


@pytest.mark.parametrize(("few", "code"), [({}, "few_prompts"), ({"few": FEW_FOLDS}, "few_folds")])
def test_the_reason_for_too_few_units_names_their_kind(few: dict[str, Unavailable], code: str) -> None:
    (estimate,) = estimates_over_units(["mean"], lambda sums: sums[..., :1] / 3.0, torch.ones(3, 1), **few).values()
    assert estimate.value == 1.0
    assert estimate.code == code
    assert code.removeprefix("few_") in estimate.reason


@pytest.mark.parametrize("size", [1.0, 1e-170, 1e170])  # whose squares are no numbers
def test_a_sum_has_the_degrees_of_freedom_of_satterthwaite(size: float) -> None:
    assert samples_of_sum([size] * 3, [8] * 3) == 1 + 3 * 7
    assert samples_of_sum([3 * size, size, 0.0], [8, 5, 1]) == 1 + int(4**2 / (3**2 / 7 + 1**2 / 4))
