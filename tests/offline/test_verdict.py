"""The verdict on an analysis appears if the first order is off by more than noise, and by enough to mislead."""

from __future__ import annotations

import math

import pytest
from analyzed_runs import results_of

from rl_training.offline.results import ROWS
from rl_training.records.first_order import KEYS, first_order_verdict


def test_a_second_order_that_cancels_the_first_is_reported_with_a_smaller_step_to_use() -> None:
    """The difference is .97 of the prediction, and .48 of it at half the step. Errors are .46 and .209, times 1.96."""
    assert first_order_verdict(41, results_of(-0.807, -0.026, 0.209, 0.46)) == (
        True,
        "Step 41: higher orders cancel the first: do not trust forward alone at this learning rate. Predicted "
        "-0.81 ± 0.90, measured -0.03 ± 0.90, difference -0.78 ± 0.41 (1e-3 nats per token, 95 %). If it is "
        "second order, it would be less than half of the prediction at 1/2 of the step.",
    )


@pytest.mark.parametrize(
    ("predicted", "measured", "does", "fraction"),
    [
        (-1.0, -0.5, "cancel", "1/2"), (-1.0, -0.01, "cancel", "1/2"), (-1.0, 0.0, "cancel", "1/4"),
        (1.0, -0.9, "outweigh", "1/4"), (-1.0, 1.5, "outweigh", "1/8"), (-1.0, -2.1, "add to", "1/4"),
    ],
)  # fmt: skip
def test_the_advised_fraction_of_the_step_halves_the_share_of_second_order(
    predicted: float, measured: float, does: str, fraction: str
) -> None:
    """The difference's share of the prediction (.5, .99, 1, 1.9, 2.5 and −1.1) halves when the step is halved."""
    told = first_order_verdict(1, results_of(predicted, measured, 0.1)).sentence
    assert f" at {fraction} of the step" in told
    assert f"higher orders {does} the first" in told


@pytest.mark.parametrize(
    ("predicted", "measured", "stderr", "of_predicted"),
    [
        (-0.754, -0.588, 0.027, 0.18),  # significant, but only a fifth of the prediction
        (-1.0, 0.0, 0.52, 0.1),  # as large as the prediction, but not significant
        (0.01, -0.05, 0.001, 0.4),  # six times a prediction that is pure noise, and small compared with that noise
    ],
)
def test_small_or_insignificant_differences_are_not_reported(
    predicted: float, measured: float, stderr: float, of_predicted: float
) -> None:
    assert not first_order_verdict(1, results_of(predicted, measured, stderr, of_predicted)).fails


def test_unknown_differences_are_not_reported_and_the_prediction_needs_no_error_bar() -> None:
    without_bar = {**results_of(-1.0, 0.0, 0.1), "deltaH1_se": math.nan}
    assert "cancel the first" in first_order_verdict(1, without_bar).sentence
    assert "Predicted -1, measured" in first_order_verdict(1, without_bar).sentence
    for lost in ("paired_error", "paired_error_se", "deltaH1"):
        told = first_order_verdict(1, {**results_of(-1.0, 0.0, 0.1), lost: math.nan}, {lost: "it was not asked for"})
        assert told == (False, "Step 1: whether the prediction holds is not known: it was not asked for.")
    assert not first_order_verdict(1, {}).fails
    assert set(KEYS) <= set(ROWS)


def test_a_change_that_a_prediction_of_0_does_not_have_is_not_said_to_agree_with_it() -> None:
    """Weights that no gradient reaches, for example; no smaller step would have another share of second order."""
    nothing = {"deltaH1": 0.0, "deltaH1_se": 0.0, "deltaH_true": -0.05, "deltaH_true_se": 0.001}
    told = first_order_verdict(5, {**nothing, "paired_error": 0.05, "paired_error_se": 0.001})
    assert told == (
        True,
        "Step 5: the first order is as good as 0, and higher orders are not: do not trust forward here. "
        "Measured -50.0 ± 2.0 (1e-3 nats per token, 95 %).",
    )
