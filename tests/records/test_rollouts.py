"""The recorded sequences of a run: compared with the trainer's numbers, read after a kill, and shown on the page."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from trainers import trainer_maker
from trl import GRPOTrainer

from rl_training.records import rollouts
from rl_training.records.jsonl import ROLLOUTS_FILE, iterate_rollouts, read_metrics
from rl_training.records.report import write_report
from rl_training.records.writer import Records


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of three steps, with two steps on each rollout."""
    folder = tmp_path_factory.mktemp("rollouts") / "run"
    make: Callable[..., GRPOTrainer] = trainer_maker(folder)
    records = Records(folder / "logs", rollouts_every=1)
    make(records=records, max_steps=3, steps_per_generation=8, max_completion_length=8).train()
    return folder


def test_requested_steps_hold_every_sequence_with_the_logged_numbers(run: Path) -> None:
    table = rollouts(run)
    assert table.groupby("step").size().to_dict() == {1: 32, 2: 32, 3: 32}
    assert table.groupby(["step", "prompt_index"]).size().eq(4).all()
    logged = next(row for row in read_metrics(run / "logs") if row["step"] == 1)  # the rollout of steps 1 and 2
    assert logged["reward"] == pytest.approx(table[table["step"] <= 2]["reward"].mean(), abs=1e-6)
    first, second = (table[table["step"] == step] for step in (1, 2))
    reward_minus_mean = first["reward"] - first.groupby("prompt_index")["reward"].transform("mean")
    assert (first["advantage"] - reward_minus_mean).abs().max() < 1e-6
    assert first["importance_ratio"].sub(1).abs().max() < 1e-4  # at the parameters that sampled
    assert second["importance_ratio"].sub(1).abs().max() > 1e-3  # a step later
    assert (table["logp"] < 0).all()
    assert table["length"].between(1, 8).all()
    assert table["prompt"].str.len().gt(0).all()


def test_rollouts_cut_by_a_kill_are_read_up_to_the_cut_and_continued(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for step in (1, 2, 3):
        records.write_rollouts(step, [{"response": "é<b>\n" * 50, "reward": float("nan")}] * 2)
    path = tmp_path / ROLLOUTS_FILE
    path.write_bytes(path.read_bytes()[:-30])
    assert {row["step"] for row in iterate_rollouts(tmp_path)} >= {1, 2}
    records.start(after_step=2)
    records.write_rollouts(3, [{"response": "x"}])
    rows = list(iterate_rollouts(tmp_path))
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3]
    assert rows[0]["response"] == "é<b>\n" * 50
    assert rows[0]["reward"] != rows[0]["reward"]
    with gzip.open(path, "ab") as file:
        file.write(b"no json\n")
    with pytest.raises(ValueError, match=rf"{ROLLOUTS_FILE}, line 6\b"):
        list(iterate_rollouts(tmp_path))


def test_no_rollouts_are_written_by_default(tmp_path: Path) -> None:
    assert list(iterate_rollouts(tmp_path)) == []
    assert not any(Records(tmp_path).wants_rollouts_of(step) for step in range(1, 9))


def test_the_report_shows_some_rollouts_and_escapes_them(run: Path) -> None:
    Records(run / "logs").write_rollouts(
        5, [{**next(iterate_rollouts(run / "logs")), "step": 5, "response": "<script>alert(1)"}]
    )
    page = write_report(run).read_text(encoding="utf-8")
    assert "What the model said" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
