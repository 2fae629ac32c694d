"""`attach(..., alerts=True)` sends what stands out once, in the report's words, through the trackers with a run."""

from __future__ import annotations

import importlib
import sys
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainers import FEW, differing, outcome
from trl import GRPOTrainer

from rl_training import attach
from rl_training.hosts.trl import alerts
from rl_training.records.report.standing_out import standing_out
from rl_training.records.table.reading import read_run

PLAIN: dict[str, Any] = {"trainer_class": GRPOTrainer, "use_cpu": True, "bf16": False, **FEW}


def constant(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, str]]]:
    """Return the alerts sent to each tracker. Both have a run, of which only its alerts are looked at."""
    importlib.import_module("rl_training.hosts.trl.trainer_kind")  # TRL looks for the trackers when it is imported
    sent: dict[str, list[tuple[str, str]]] = {"wandb": [], "trackio": []}
    run = SimpleNamespace(alert=lambda title, text: sent["wandb"].append((title, text)))
    current: ContextVar[Any] = ContextVar("current", default=run)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    record = SimpleNamespace(
        alert=lambda title, text: sent["trackio"].append((title, text)),
        context_vars=SimpleNamespace(current_run=current),
    )
    monkeypatch.setitem(sys.modules, "trackio", record)
    monkeypatch.setattr(alerts, "FIRST", 3)
    return sent


def test_a_run_without_a_signal_is_alerted_once_in_the_reports_words_and_trains_the_same(
    make_trainer: Any, tmp_path: Path, trackers: dict[str, list[tuple[str, str]]]
) -> None:
    settings = PLAIN | {"reward": constant, "max_steps": 7}
    silent = make_trainer(**settings)
    with attach(silent, probes="ess"):
        expected = outcome(silent)
    assert trackers == {"wandb": [], "trackio": []}
    trainer = make_trainer(**settings)
    with attach(trainer, tmp_path / "run", "ess", alerts=True):
        assert differing(outcome(trainer), expected) == []
    assert not any(isinstance(callback, alerts.Alerts) for callback in trainer.callback_handler.callbacks)
    of_report = [finding.text.split(" Since step")[1] for finding in standing_out(read_run(tmp_path / "run"))]
    assert of_report
    for sent in trackers.values():
        titles, texts = zip(*sent, strict=True)
        assert len({title.split(": ")[1] for title in titles}) == len(titles)  # each once
        assert {text.split(" Since step")[1] for text in texts} >= {*of_report}


def test_without_a_tracker_the_line_is_logged_and_a_failing_one_does_not_end_training(
    make_trainer: Any, tmp_path: Path, trackers: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    sys.modules["wandb"].run = None
    sys.modules["trackio"].context_vars.current_run.set(None)
    alerts.senders()["log"]("title", "the text of a line")
    assert caplog.messages[-1] == "the text of a line"
    monkeypatch.setattr(alerts, "senders", lambda: {"log": lambda title, text: 1 / 0})
    trainer = make_trainer(**PLAIN | {"reward": constant, "max_steps": 4})
    with attach(trainer, tmp_path / "run", "ess", alerts=True):
        trainer.train()
    assert [line for line in caplog.messages if line.startswith("alerts could not be made (ZeroDivisionError")]
    assert trainer.state.global_step == 4


def test_an_alert_that_fails_is_sent_again_and_to_no_tracker_twice(
    make_trainer: Any, tmp_path: Path, trackers: dict[str, list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([ConnectionError("no network")])

    def alert(title: str, text: str) -> None:
        for error in failures:
            raise error
        trackers["wandb"].append((title, text))

    sys.modules["wandb"].run = SimpleNamespace(alert=alert)
    monkeypatch.setattr(alerts, "FIRST", 2)
    trainer = make_trainer(**PLAIN | {"reward": constant, "max_steps": 8})
    with attach(trainer, tmp_path / "run", "ess", alerts=True):
        trainer.train()
    names = {tracker: [title.split(": ")[1] for title, _ in sent] for tracker, sent in trackers.items()}
    assert "equal" in names["trackio"]
    assert sorted(names["wandb"]) == sorted(names["trackio"]) == sorted({*names["trackio"]})


def test_a_second_training_in_the_same_block_is_alerted_of_too(
    make_trainer: Any, tmp_path: Path, trackers: dict[str, list[tuple[str, str]]]
) -> None:
    trainer = make_trainer(**PLAIN | {"reward": constant, "max_steps": 4})
    with attach(trainer, tmp_path / "run", "ess", alerts=True):
        for _ in range(2):
            trainer.train()
    assert [title for title, _ in trackers["trackio"]] == ["3 steps: equal"] * 2


def test_alerts_without_a_folder_are_refused(make_trainer: Any) -> None:
    with pytest.raises(ValueError, match=r"attach\(trainer, FOLDER, alerts=True\)"):
        attach(make_trainer(**PLAIN), alerts=True)
