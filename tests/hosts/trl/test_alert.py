"""The alert of a run: when it comes, how often it was right, where it stands, and what a resumed run knows of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configs import quick_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainers import FEW
from trl import GRPOConfig, GRPOTrainer

from rl_training.hosts.trl import alert
from rl_training.hosts.trl.alert import EntropyAlert
from rl_training.job.build import TrainingRun
from rl_training.mathematics.forecast import EntropyForecast
from rl_training.records.jsonl import read_metrics
from rl_training.records.report import write_report
from rl_training.records.report.findings import alerts, forecast_of
from rl_training.records.report.series import read_run
from rl_training.records.report.summary import summarize

SMALL = [
    "trainer.max_steps=6", "trainer.num_generations=2", "batch.sequences_per_step=16", "batch.microbatch_size=4",
    "trainer.max_completion_length=8",
]  # fmt: skip


def run_of(folder: Path, *overrides: str) -> TrainingRun:
    return quick_run(folder, *SMALL, "logger=tensorboard", *overrides)


def test_it_is_in_log_records_report_and_dashboard_and_ends_the_run_if_asked_to(tmp_path, caplog, monkeypatch) -> None:
    """Entropy is far below 9 nats from the beginning: after three measured steps it says so; the next is the last."""
    monkeypatch.setattr(alert, "FIRST_MISSES", 2)
    run = run_of(tmp_path / "run", "alert.below=9", "alert.stop=true")
    run.train()
    for dashboard in run.loggers:
        dashboard.finish([])
    run.end()  # as one that is done, not as one that a signal ended
    assert run.trainer.state.global_step == 4
    assert (run.run_dir / "training_state" / "checkpoint-4").is_dir()
    told = [line for line in caplog.messages if alert.TITLE in line]
    assert told[0].startswith("entropy is about to be low: step 3: token entropy is ")
    assert "has a 100% chance to be below 9 in 20 steps" in told[0]
    assert "0 of 0 were right in this run; 57 to 89 % were right in the benchmark" in told[0]
    assert "does not know this run's noise yet: 2 of 20 steps" in told[0]
    assert told[0].endswith("alert.stop ends the run")
    lines = {line["step"]: line for line in read_metrics(run.run_dir / "logs")}
    assert [lines[step]["forecast/alerts"] for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    records = read_run(run.run_dir)
    assert alerts(records) == ([3], 0, 0)
    row = next(row for row in summarize(records) if row.label == "alerts")
    assert row.value == "at step 3"
    assert "0 of the 0" in row.note
    forecast = EntropyForecast()
    for step in (1, 2, 3, 4):
        line = lines[step]
        names = ("entropy/token", "entropy/token_se", "delta_h/forward", "delta_h/forward_se")
        forecast.see(step, *(line[name] for name in names))
    assert lines[4]["forecast/median"] == forecast.ahead(20).median  # and the records say the same as the log
    events = EventAccumulator(str(run.run_dir / "logs" / "tensorboard"))
    events.Reload()
    assert f"alert: {alert.TITLE}/text_summary" in events.Tags()["tensors"]
    assert "forecast/chance_below" in events.Tags()["scalars"]


def listen(entropies: Iterable[float], below: float, **settings: Any) -> tuple[EntropyAlert, list[int], list[dict]]:
    """Returns the alert, the steps at which it spoke, and the lines of a log of TRL's own entropy from step 1 on."""
    told: list[int] = []
    listener = EntropyAlert(below, tell=lambda _, text: told.append(int(text.split()[1].rstrip(":"))), **settings)
    lines = []
    for step, entropy in enumerate(entropies, start=1):
        lines.append({"loss": 0.0, "entropy": entropy})
        listener.on_log(None, SimpleNamespace(global_step=step, is_world_process_zero=True), None, lines[-1])
    return listener, told, lines


def falling(rate: float, steps: int, start: float = 0.2) -> list[float]:
    return [start * math.exp(-rate * step) for step in range(steps)]


def test_it_fires_at_a_chance_of_one_half_then_is_quiet_for_20_steps_and_while_entropy_stays_below() -> None:
    """A random walk around the level, against the rule written out; the first ten steps say nothing.

    `news`: that it is below is one when it has been above since the last alert, or since that came true.
    """
    rng = random.Random(1)
    logs = [math.log(0.12)]
    for _ in range(400):
        logs.append(logs[-1] + rng.gauss(0.1 * (math.log(0.1) - logs[-1]), 0.08))
    entropies = [math.exp(log) for log in logs]
    _, told, lines = listen(entropies, below=0.1)
    expected: list[int] = []
    news, due = True, 0
    for step in range(1, len(entropies) + 1):
        window = entropies[max(0, step - 5) : step]
        below = sum(window) / len(window) < 0.1
        news = (news or not below) and not (below and step <= due)
        due = 0 if below else due
        loud = step >= 10 and news and (not expected or step >= expected[-1] + 20)
        if loud and lines[step - 1]["forecast/chance_below"] >= 0.5:
            expected.append(step)
            news, due = False, 0 if below else step + 20
    assert told == expected
    assert len(told) > 5
    assert listen([0.05] * 50, below=0.1)[1] == [10]


def test_an_alert_is_right_when_the_mean_of_five_is_below_the_level_within_its_20_steps() -> None:
    """At step s entropy is .2 e^(−.02 (s−1)): below .1 from step 36 on, and the mean over five is two steps behind."""
    falls = falling(0.02, 60)
    listener, told, lines = listen(falls, below=0.1)
    came_true = next(step for step in range(5, 60) if sum(falls[step - 5 : step]) / 5 < 0.1)
    assert came_true == 38
    assert told[0] < came_true <= told[0] + 20
    assert [line["forecast/alerts_right"] for line in lines[came_true - 2 : came_true]] == [0, 1]
    assert lines[came_true - 2]["forecast/alerts_checked"] == 0
    assert (listener.alerts, listener.checked, listener.right) == (1, 1, 1)


def test_an_alert_is_wrong_when_its_20_steps_have_passed() -> None:
    fell = falling(0.02, 60)
    at = listen(fell, below=0.1)[1][0]
    turned = [*fell[:at], *([0.2] * 25)]
    listener, told, lines = listen(turned, below=0.1)
    assert told[:1] == [at]
    assert [line["forecast/alerts_checked"] for line in lines[at + 18 : at + 20]] == [0, 1]
    assert (listener.checked, listener.right) == (1, 0)


def test_it_asks_for_the_end_at_a_chance_of_four_fifths_also_while_it_is_quiet() -> None:
    asked: list[int] = []
    falls = falling(0.02, 60)
    chances = [line["forecast/chance_below"] for line in listen(falls, below=0.1)[2]]
    sure = next(step for step, chance in enumerate(chances, start=1) if chance >= 0.8)
    _, told, _ = listen(falls[:sure], below=0.1, stop=lambda: asked.append(1))
    assert told[-1] == sure
    assert told[0] < sure < told[0] + 20
    assert len(asked) == 1


def test_what_a_probe_measures_counts_alone_from_the_step_on_at_which_it_does() -> None:
    probed = {"entropy/token": 0.2, "entropy/token_se": 0.002, "delta_h/forward": -0.01, "delta_h/forward_se": 0.001}
    listener = EntropyAlert(below=0.05)
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    listener.on_log(None, state, None, {"entropy": 7.0, **probed})
    between = {"entropy": 7.0}
    listener.on_log(None, SimpleNamespace(global_step=2, is_world_process_zero=True), None, between)
    assert between == {"entropy": 7.0}  # no forecast of a step that was not measured
    forecast = EntropyForecast()
    forecast.see(1, 0.2, 0.002, -0.01, 0.001)
    forecast.see(3, 0.19, 0.002, -0.01, 0.001)
    third = {**probed, "entropy": 7.0, "entropy/token": 0.19}
    listener.on_log(None, SimpleNamespace(global_step=3, is_world_process_zero=True), None, third)
    assert third["forecast/median"] == forecast.ahead(20).median


def test_a_resumed_plain_trainer_forecasts_like_an_uninterrupted_one(make_trainer, monkeypatch) -> None:
    monkeypatch.setattr(alert, "FIRST_MISSES", 1)
    settings: dict[str, Any] = {
        **FEW,
        "config_class": GRPOConfig,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "steps",
        "save_steps": 2,
    }

    def trained(resume: bool, steps: int) -> tuple[EntropyAlert, list[str]]:
        trainer, told = make_trainer(GRPOTrainer, max_steps=steps, **settings), []
        listener = EntropyAlert(below=9.0, tell=lambda _, text: told.append(text))
        trainer.add_callback(listener)
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2" if resume else None)
        return listener, told

    whole, told = trained(resume=False, steps=4)
    again, told_again = trained(resume=True, steps=4)
    assert whole._forecast.step == again._forecast.step == 4
    assert whole._forecast.ahead(20) == again._forecast.ahead(20)
    assert len(told) == 1
    assert told_again == []  # it was said before step 2, and is not said again
    assert again.alerts == 1


@pytest.mark.parametrize("probe", ["none", "simple"])
def test_the_report_forecasts_from_records_what_the_alert_does_from_the_log(tmp_path: Path, probe: str) -> None:
    run = run_of(tmp_path / "run", f"probe={probe}", "alert.below=0.001", "trainer.max_steps=11", "logger=none")
    run.train()
    last, forecast = read_metrics(run.run_dir / "logs")[-1], forecast_of(read_run(run.run_dir))
    assert forecast is not None
    assert forecast.ahead(20).median == last["forecast/median"]
    assert alerts(read_run(run.run_dir)) == ([], 0, 0)
    if probe == "none":  # once: a page takes seconds
        page = write_report(run.run_dir).read_text(encoding="utf-8")
        assert f"{last['forecast/median']:.2g} nats in 20 steps" in page
