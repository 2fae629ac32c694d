"""Claims on the first lines of a report: when entropy is spent, lost, steady or unknown, and the advice for each case.

The runs are curves with known noise: its standard deviation per step is .01 nats for entropy and .03 for reward.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from logged_runs import Curve, log_run, noisy
from scipy import stats

from rl_training import Estimate
from rl_training.records.jsonl import Records
from rl_training.records.report.opening import opening
from rl_training.records.report.series import read_run
from rl_training.records.report.trends import line_through
from rl_training.records.report.verdict import (
    HEADLINES,
    LOST,
    RISES,
    SPENT,
    STEADY,
    UNKNOWN,
    Verdict,
    entropy_now,
    forward_and_backward,
    judge,
)


def verdict(folder: Path, entropy: Curve, reward: Curve, steps: int = 40) -> Verdict:
    return judge(read_run(log_run(folder, steps, entropy=noisy(entropy, 0.01, 1), reward=noisy(reward, 0.03, 2))))


def falling(step: int) -> float:
    return 0.5 * 0.97**step


def rising(step: int) -> float:
    return 0.3 + 0.01 * step


CASES = {
    SPENT: (falling, rising),
    LOST: (falling, lambda step: 0.5),
    STEADY: (lambda step: 0.5, rising),
    RISES: (lambda step: 0.3 + 0.005 * step, lambda step: 0.5),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_verdict_follows_the_entropy_and_reward_curves(tmp_path: Path, kind: str) -> None:
    judgement = verdict(tmp_path, *CASES[kind])
    assert judgement.kind == kind
    assert judgement.since == (1 if kind in (SPENT, LOST) else 21)  # the longest stretch, or the last half of the run


def test_entropy_counts_as_lost_where_reward_stands_still(tmp_path: Path) -> None:
    """Reward rises by .02 per step until step 30 of 80 and then stays the same. Entropy falls all the time."""
    judgement = verdict(tmp_path, falling, lambda step: 0.2 + 0.02 * min(step, 30), steps=80)
    assert judgement.kind == LOST
    assert 20 <= judgement.since <= 35
    assert judgement.entropy.bounds()[1] < 0
    assert judgement.reward.bounds()[0] <= 0 <= judgement.reward.bounds()[1]


def test_entropy_counts_as_lost_where_reward_falls(tmp_path: Path) -> None:
    assert verdict(tmp_path, falling, lambda step: 0.8 - 0.01 * step).kind == LOST


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_not_reported_as_a_fall(tmp_path: Path, seed: int) -> None:
    level, reward = noisy(lambda step: 0.5, 0.05, seed), noisy(lambda step: 0.0, 0.0)
    judgement = judge(read_run(log_run(tmp_path, entropy=level, reward=reward, reward_std=0.0)))
    assert judgement.kind in (STEADY, UNKNOWN)
    assert "fall" not in judgement.headline + judgement.evidence


def test_seven_steps_are_reported_as_too_few_for_a_verdict(tmp_path: Path) -> None:
    judgement = verdict(tmp_path, falling, rising, steps=7)
    assert judgement.kind == UNKNOWN
    assert judgement.evidence == ": fewer than 8 steps are logged, and no probe has measured one."


def test_a_significant_but_tiny_change_counts_as_steady(tmp_path: Path) -> None:
    """The change is −.00002 ± .000005 per step. Over 40 steps this is less than a fiftieth of half a nat."""
    tiny = {"measured/delta_h": lambda step: Estimate(-2e-5, 2e-6, 8), "measured/steps": lambda step: Estimate(1.0)}
    run = read_run(log_run(tmp_path, estimates=tiny, entropy=noisy(lambda step: 0.5, 0.05), reward=0.5))
    assert judge(run).kind == STEADY


def test_the_current_change_uses_the_most_precise_source(tmp_path: Path) -> None:
    """A line through levels that scatter by .05 gives a step to about .004 nats, a mean of 20 predictions to .0005."""
    said = {"delta_h/forward": lambda step: Estimate(-3e-3, 1e-3, 8)}
    run = read_run(log_run(tmp_path, estimates=said, entropy=noisy(lambda step: 0.5 - 3e-3 * step, 0.05)))
    now, since, source = entropy_now(run)
    assert (now.value, since, source) == (pytest.approx(-3e-3), 21, "mean of the predictions")


def test_the_current_change_ignores_predictions_where_forward_and_backward_disagree(tmp_path: Path) -> None:
    """Forward is −3, backward +1, in thousandths. Half of their difference is 2 of 3, far above its error."""
    said = {
        "delta_h/forward": lambda step: Estimate(-3e-3, 1e-4, 8),
        "delta_h/backward": lambda step: Estimate(1e-3, 1e-4, 8, about_step=step - 1),
    }
    run = read_run(log_run(tmp_path, estimates=said, entropy=noisy(lambda step: 0.5 - 1e-3 * step, 0.01)))
    assert entropy_now(run)[2] == "line through the logged steps"
    first = opening(run)
    assert first.lines[0].evidence.startswith("Steps are too large for first order: half of forward − backward is -2.0")
    assert first.advice == "To change: attach(…, target_kl_share=0.002), since steps are too large."


def test_half_a_difference_has_half_its_error(tmp_path: Path) -> None:
    said = {
        "delta_h/forward": lambda step: Estimate(-3e-3, 1e-4, 8),
        "delta_h/backward": lambda step: Estimate(1e-3, 1e-12, 8, about_step=step - 1),
    }
    ahead, half = forward_and_backward(read_run(log_run(tmp_path, estimates=said)))
    assert half.value == pytest.approx(-2e-3)
    assert ahead.stderr > 0
    assert half.stderr == pytest.approx(0.5 * ahead.stderr)


def test_a_lines_slope_and_error_are_those_of_least_squares() -> None:
    """Compared with scipy, for alternating residuals, which have no positive correlation."""
    steps = np.arange(1, 21)
    values = pd.Series(0.3 * steps + np.where(steps % 2, 0.5, -0.5), index=steps)
    fit, line = stats.linregress(steps, values), line_through(values)
    assert (line.value, line.stderr) == (pytest.approx(fit.slope), pytest.approx(fit.stderr))
    assert line.half_width() == pytest.approx(stats.t.ppf(0.975, 18) * fit.stderr)


def test_the_interval_of_a_line_covers_under_autocorrelated_noise() -> None:
    """At most a sixth of 400 series without a trend appear to have one; their noise has correlation .6 between steps.

    With plain least squares nearly a third do.
    """
    draw = np.random.default_rng(0)
    noise = draw.normal(size=(400, 60))
    for step in range(1, 60):
        noise[:, step] = 0.6 * noise[:, step - 1] + 0.8 * noise[:, step]
    lines = [line_through(pd.Series(row[20:])) for row in noise]
    assert sum(line.bounds()[0] > 0 or line.bounds()[1] < 0 for line in lines) <= 66


LOSING = {"entropy": noisy(falling, 0.01, 1), "reward": noisy(lambda step: 0.5, 0.03, 2)}


def test_the_advice_for_lost_entropy_is_the_cheapest_measured_intervention(tmp_path: Path) -> None:
    folder = log_run(tmp_path, **LOSING)
    assert opening(read_run(folder)).advice == 'To measure what would keep it: probes=["simple", "interventions"].'
    effect, plain = Estimate(1e-3, 1e-4, 8, detail={"measured_steps": 3}), Estimate(-9e-3, 1e-4, 8)
    priced = {
        name: {"mean_delta_h": effect, "mean_delta_h_kept": effect, "mean_price": Estimate(price, 0.1, 8),
               "kept_halves_at": Estimate(strength)}
        for name, price, strength in (("lr", 4.0, 0.5), ("bonus:0.02", 2.0, 0.014))
    }  # fmt: skip
    told = {f"intervention/{name}/{what}": e for name, quantities in priced.items() for what, e in quantities.items()}
    Records(folder / "logs").write_estimates(40, 1, "interventions", {**told, "intervention/plain_mean_delta_h": plain})
    assert opening(read_run(folder)).advice == (
        "To change: GRPOConfig(entropy_coef=0.014), the cheapest measured intervention that keeps entropy."
    )


def test_an_anomaly_is_advised_on_before_a_change_of_the_loss(tmp_path: Path) -> None:
    scale = {"gns/batch_ratio": 0.05, "gns/batch_ratio_low": 0.02, "gns/batch_ratio_high": 0.1}
    told = {name: lambda step, value=value: Estimate(value, 0.01, 20) for name, value in scale.items()}
    first = opening(read_run(log_run(tmp_path, estimates=told, **LOSING)))
    assert first.headline == "Entropy is being lost"
    assert first.advice == "To change first: GRPOConfig(gradient_accumulation_steps=40), or a lower learning_rate."


def test_where_entropy_needs_nothing_the_advice_is_to_fix_the_anomaly(tmp_path: Path) -> None:
    """Both if responses are sampled with top-p, and if after seven steps nothing is known about entropy."""
    for steps, nothing in ((40, "nothing to do."), (7, "nothing to do yet.")):
        folder = log_run(tmp_path / str(steps), steps, entropy=noisy(lambda step: 0.5, 0.01, 1),
                         reward=noisy(rising, 0.03, 2), settings={"top_p": 0.7})  # fmt: skip
        told = f"About entropy there is {nothing} To change because of what stands out: GRPOConfig(top_p=1)."
        assert opening(read_run(folder)).advice == told


def test_the_page_on_falling_entropy_has_a_row_for_each_verdict() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "entropy_is_falling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|.*\| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == len(HEADLINES)
    for kind, said in HEADLINES.items():
        do = next(what for words, what in rows if said.endswith(words))
        assert do.startswith("nothing") == (kind != LOST)


def test_a_run_that_spends_its_entropy_has_nothing_to_do(tmp_path: Path) -> None:
    run = read_run(log_run(tmp_path, entropy=noisy(falling, 0.01, 1), reward=noisy(rising, 0.03, 2)))
    first = opening(run)
    assert first.advice == "There is nothing to do."
    assert not first.lines


def test_runs_of_the_job_are_advised_with_overrides(tmp_path: Path) -> None:
    log_run(tmp_path, **LOSING)
    (tmp_path / "config.yaml").write_text("trainer: {learning_rate: 0.0001}\nbatch: {sequences_per_step: 128}\n")
    assert opening(read_run(tmp_path)).advice == "To measure what would keep it: probe=[simple,interventions]."
