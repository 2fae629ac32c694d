"""Claims on the leaderboard: each predictor on a softmax bandit whose entropy is known, each score by hand."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training import Estimate
from rl_training.mathematics.forecast import Ahead

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def module(name: str) -> Any:
    sys.path.insert(0, BENCHMARKS)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(BENCHMARKS)


scores = module("leaderboard_scores")


def entropy(logits: Tensor) -> Tensor:
    logps = logits.log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def pulls(advantages: Tensor, rate: float, copies: int = 1) -> Any:
    """Returns the facts of a step of a bandit: arm a pulled once for each row, p of it known; lengths of one token."""
    logps = PROBABILITIES.log()[: len(advantages)].repeat(copies).unsqueeze(1)
    same = torch.ones_like(logps)
    return module("predictors").StepFacts(
        learning_rate=rate,
        advantages=advantages.repeat(copies),
        mask=same.bool(),
        logps=logps,
        entropies=same * entropy(PROBABILITIES.log()),
        squares=same * PROBABILITIES.square().sum(),
        log_squares=same * (PROBABILITIES.square() * PROBABILITIES.log()).sum(),
        products={},
    )


def test_s_star_is_the_change_of_entropy_by_a_small_policy_gradient_step_on_a_table_of_logits() -> None:
    advantages, rate = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64), 1e-4
    arms = torch.eye(4, dtype=torch.float64)
    step = rate * (advantages.unsqueeze(1) * (arms - PROBABILITIES)).mean(dim=0)
    measured = (entropy(PROBABILITIES.log() + step) - entropy(PROBABILITIES.log() - step)) / 2
    said = module("predictors.s_star").predict(pulls(advantages, rate))
    assert said.value == pytest.approx(float(measured), rel=1e-6)


def test_the_covariance_is_the_change_by_a_natural_gradient_step() -> None:
    """Each logit moves by lr A(a): dH = −lr Cov_π(log π, A), with each arm pulled as often as π says."""
    advantages, rate = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64), 1e-4
    often = (PROBABILITIES * 20).round().long()
    facts = pulls(advantages, rate)
    rows = torch.arange(4).repeat_interleave(often)
    facts = module("predictors").StepFacts(
        **{name: value[rows] if isinstance(value, Tensor) else value for name, value in vars(facts).items()}
    )
    step = rate * advantages
    measured = (entropy(PROBABILITIES.log() + step) - entropy(PROBABILITIES.log() - step)) / 2
    assert module("predictors.covariance").predict(facts).value == pytest.approx(float(measured), rel=1e-5)


def test_steers_omega_by_hand() -> None:
    facts = pulls(torch.tensor([2.0, -1.0], dtype=torch.float64), rate=0.5)
    h = float(entropy(PROBABILITIES.log()))
    omega = [2.0 * 0.5 * (math.log(0.5) + h), -1.0 * 0.7 * (math.log(0.3) + h)]
    assert module("predictors.steer").predict(facts).value == pytest.approx(-0.5 * sum(omega) / 2, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "product"), [("forward", "forward"), ("reuse", "reuse"), ("naive_sgd", "sgd"), ("deltaH1", "deltaH1")]
)
def test_products_are_those_of_the_engine(name: str, product: str) -> None:
    products = {key: Estimate(value) for value, key in enumerate(("forward", "backward", "reuse", "sgd", "deltaH1"))}
    facts = module("predictors").StepFacts(0.1, *[torch.zeros(1)] * 6, products)
    assert module(f"predictors.{name}").predict(facts) is products[product]


def pairs(said: list[float], truth: list[float], width: float = math.nan, truth_width: float = 0.1) -> Any:
    one = torch.ones(len(said), dtype=torch.float64)
    return scores.Pairs(
        said=torch.tensor(said, dtype=torch.float64),
        said_width=width * one,
        truth=torch.tensor(truth, dtype=torch.float64),
        truth_width=truth_width * one,
    )


def test_a_slope_weighs_runs_alike_whatever_the_size_of_their_changes() -> None:
    small, large = pairs([1.0, -1.0], [2.0, -2.0]), pairs([100.0, -300.0], [100.0, -300.0])
    # Σ p t and Σ p² over Σ t²: 4/8 and 2/8, 1 and 1
    assert scores.slope(small) == (0.5, 0.25)
    assert scores.slope(large) == (1.0, 1.0)
    assert scores.over_runs([scores.slope(small), scores.slope(large)])[0] == pytest.approx(1.5 / 1.25)


def test_a_correlation_is_along_a_run() -> None:
    assert scores.correlation(pairs([1.0, 2.0, 3.0], [11.0, 12.0, 13.0])) == pytest.approx((1.0, 1.0))
    assert scores.correlation(pairs([11.0, 12.0, 13.0], [-5.0, -6.0, -7.0])) == pytest.approx((-1.0, 1.0))


def test_signs_count_where_the_truth_has_one() -> None:
    run = pairs([1.0, -1.0, 1.0, -1.0], [0.5, 0.5, 0.05, -0.2], truth_width=0.1)
    assert scores.sign(run) == (2.0, 3.0)


def test_coverage_takes_both_errors_and_no_step_without_an_interval() -> None:
    run = pairs([0.0, 0.0, 0.0], [0.4, 0.6, -0.5], width=0.3, truth_width=0.4)
    assert scores.coverage(run) == (2.0, 3.0)  # √(0.3² + 0.4²) = 0.5
    assert scores.coverage(pairs([0.0], [9.0])) == (0.0, 0.0)


def test_an_interval_draws_runs_with_replacement() -> None:
    """Of two runs, 0 of 1 and 3 of 3, the share is 0, ¾ or 1 with chances ¼, ½, ¼: the 95 % interval is all of it."""
    assert scores.over_runs([(0.0, 1.0), (3.0, 3.0)]) == (0.75, 0.0, 1.0)
    assert scores.over_runs([(0.3, 1.0)] * 3) == pytest.approx((0.3, 0.3, 0.3))
    # Ten runs, one of them with a 1: none drawn has chance .9¹⁰ = .35, five or more .0016
    value, low, high = scores.over_runs([(float(run == 0), 1.0) for run in range(10)])
    assert (value, low, high) == pytest.approx((0.1, 0.0, 0.3))


def test_errors_and_intervals_of_forecasts_by_hand() -> None:
    assert scores.rms(torch.tensor([3.0, 4.0])) == pytest.approx(math.sqrt(12.5))
    of = [torch.tensor(x, dtype=torch.float64) for x in ([0.9, 1.0, -0.9], [0.3, 0.3, 0.3], [0.4, 0.4, 0.4])]
    assert scores.held(*of) == pytest.approx(2 / 3)  # 1.96 √(0.3² + 0.4²) = 0.98
    assert scores.brier(torch.tensor([0.8, 0.1]), torch.tensor([True, True])) == pytest.approx((0.04 + 0.81) / 2)


def test_an_alarm_is_right_wrong_or_not_over() -> None:
    def of(alarmed: list[int], below_from: int | None, steps: int = 20, first: int = 2) -> Any:
        chances = [0.5 if step in alarmed else 0.49 for step in range(steps)]
        below = [below_from is not None and step >= below_from for step in range(steps)]
        return scores.alarms(chances, below, first, ahead=5)

    assert of([4], 9) == scores.Alarms(right=1, wrong=0, crosses=True, leads=(5,))
    assert of([4], 10) == scores.Alarms(right=0, wrong=1, crosses=True, leads=())
    assert of([4, 5, 8], 8) == scores.Alarms(right=1, wrong=0, crosses=True, leads=(4,))  # then quiet; at 8 it is there
    assert of([4, 9], None) == scores.Alarms(right=0, wrong=2, crosses=False, leads=())
    assert of([12], 8) == scores.Alarms(right=0, wrong=0, crosses=True, leads=())  # it is there already
    assert of([1], 3) == scores.Alarms(right=0, wrong=0, crosses=True, leads=())  # not asked yet
    assert of([1, 15], None) == scores.Alarms(right=0, wrong=0, crosses=False, leads=())  # not asked; not over


def test_every_predictor_and_forecaster_says_where_it_stands_and_answers() -> None:
    tables = module("leaderboard_tables")
    for package in ("predictors", "forecasters"):
        methods = tables.files_of(module(package))
        assert len(methods) >= 6
        assert all(isinstance(method.SOURCE, str) and method.SOURCE for method in methods.values())


def falling(steps: int, factor: float = 0.9) -> Any:
    """Returns the history of an entropy that is multiplied by a factor at each step, with no noise."""
    entropies = 0.8 * factor ** torch.arange(steps, dtype=torch.float64)
    small = torch.full((steps,), 1e-4, dtype=torch.float64)
    return module("forecasters").History(entropies, small, math.log(factor) * entropies, small)


@pytest.mark.parametrize("name", ["log_linear", "delta_h"])
def test_a_method_that_extrapolates_gets_a_pure_exponential_right(name: str) -> None:
    history = falling(20)
    said = module(f"forecasters.{name}").forecast(history, (10, 20))
    now = {"log_linear": history.entropy[-1], "delta_h": history.entropy[-3:].mean()}[name]
    expected = [math.log(float(now)) + steps * math.log(0.9) for steps in (10, 20)]
    assert [ahead.mean for ahead in said] == pytest.approx(expected, rel=1e-6)


def test_log_linear_says_that_what_has_no_trend_stays() -> None:
    history = falling(20)
    noise = [0.31, 0.35, 0.28, 0.33, 0.3, 0.36, 0.27, 0.3, 0.34, 0.29]  # Theil and Sen's slope is not 0
    level = module("forecasters").History(torch.tensor(noise * 2), *[history.stderr] * 3)
    near, far = module("forecasters.log_linear").forecast(level, (10, 50))
    assert near.mean == far.mean == pytest.approx(math.log(0.305), abs=0.05)


def test_stays_is_the_mean_of_three_and_the_threshold_waits_for_25_steps_below() -> None:
    history = falling(40)
    assert module("forecasters.stays").forecast(history, (10,))[0].mean == pytest.approx(
        math.log(float(history.entropy[-3:].mean()))
    )
    threshold = module("forecasters.threshold")
    assert threshold.forecast(history, (20,))[0].mean == pytest.approx(math.log(float(history.entropy[15])))
    assert threshold.forecast(falling(24), (20,)) == [Ahead(math.inf, pytest.approx(math.nan, nan_ok=True))]


def test_our_forecast_goes_on_at_the_predicted_rate_that_is_half_forgotten_after_eight_steps() -> None:
    """From one step alone all that is known of the rate is δH/H = log 0.95, exactly; φ = .92."""
    said = module("forecasters.ours").forecast(falling(1, 0.95), (10,))[0]
    assert said.mean == pytest.approx(math.log(0.8) + math.log(0.95) * (1 - 0.92**10) / (1 - 0.92), rel=1e-4)


def test_our_forecasts_follow_a_fall_and_know_more_with_delta_h() -> None:
    history = falling(40)
    both, log = (module(f"forecasters.{name}").forecast(history, (10,))[0] for name in ("ours", "logged_entropy"))
    for ahead in (both, log):
        assert ahead.mean < math.log(float(history.entropy[-1]))
    assert both.sd < log.sd


def test_what_is_held_out_is_decided_by_the_name() -> None:
    runs = module("leaderboard_runs").RUNS
    assert len({run.name for run in runs}) == len(runs) >= 60
    assert sum(run.held_out for run in runs) == 43
    assert module("leaderboard_runs").Run("chains", "adamw_3e-4", 0).held_out is True


def test_the_forecast_of_a_step_is_held_against_the_mean_of_the_five_batches_around_that_step() -> None:
    tables = module("leaderboard_forecasts")
    entropies = [0.2 + 0.01 * step for step in range(40)]
    products = [{"entropy": Estimate(h, 0.01 * h, 9), "forward": Estimate(0.0, 0.1, 9)} for h in entropies]
    facts = [module("predictors").StepFacts(0.1, *[torch.zeros(1)] * 6, p) for p in products]
    run = {"name": "x", "steps": [{"facts": of} for of in facts]}
    told = tables.foretell(lambda history, horizons: [Ahead(float(len(history.entropy)), 0.5)] * 3, run)
    # Asked first at step 9 (ten batches seen), 10 steps ahead: batch 19 and its neighbours, 0.37 to 0.41.
    assert float(told.errors[10][0]) == pytest.approx(math.log(0.39) - 10)
    assert float(told.noise[10][0]) == pytest.approx(0.01 / math.sqrt(5))
    assert len(told.errors[10]) == 40 - 2 - 19
    assert len(told.errors[50]) == 0
