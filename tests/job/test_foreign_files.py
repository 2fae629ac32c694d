"""A run from an untrusted source: no file in it makes a command read or write outside the run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from configs import composed
from foreign_runs import SECRET, analyze, branch, evaluate, foreign_run, said
from recorded_runs import record_run

from rl_training.job.configuration.prepare import prepare_analysis
from rl_training.job.run.analysis import result_files
from rl_training.job.run.folder import open_run_folder
from rl_training.records.compare.page import write_comparison
from rl_training.records.report import write_report

LETTER, FOLDER, OTHER_RUN = "outside/letter", "outside/folder", "outside/run"
# By the path of a link in the run: where it leads.
LINKS = {
    "report": FOLDER,
    "report/report.html": LETTER,
    "report/reward.png": LETTER,
    "evaluations": FOLDER,
    "evaluations/arithmetic": FOLDER,
    "evaluations/arithmetic/settings.json": LETTER,
    "evaluations/arithmetic/step_1": FOLDER,
    "evaluations/arithmetic/step_1/metrics.json": LETTER,
    "evaluations/arithmetic/not_there": "outside/not_there",
    "offline": FOLDER,
    "offline/default": FOLDER,
    "offline/default/checkpoint-1/result.json": LETTER,
    "offline/default/checkpoint-1/kernel": FOLDER,
    "offline/default/logs/today": FOLDER,
    "logs": OTHER_RUN + "/logs",
    "logs/metrics.jsonl": OTHER_RUN + "/logs/metrics.jsonl",
    "logs/probes.jsonl": LETTER,
    "logs/rollouts.jsonl.gz": LETTER,
    "logs/tensorboard": FOLDER,
    "logs/wandb": FOLDER,
    "logs/wandb_run_id": LETTER,
    "config.yaml": LETTER,
    "training_state": OTHER_RUN + "/training_state",
    "training_state/checkpoint-1": OTHER_RUN + "/training_state/checkpoint-1",
    "training_state/README.md": LETTER,
}


def report(run: Path) -> object:
    return write_report(run, "svg")


def compare(run: Path) -> object:
    return write_comparison([run, run.parent / "outside" / "run"], run.parent / "page.html")


def analyze_into(run: Path) -> object:
    (checkpoint,) = result_files(prepare_analysis(composed("offline", f"checkpoint={run}")))
    return analyze(checkpoint.parents[1])


def evaluate_into(run: Path) -> object:
    return evaluate(run).folder.start()


def resume(run: Path) -> object:
    return open_run_folder(composed("train", f"run_dir={run}", "resume=latest", "trainer.max_steps=2"))


COMMANDS = [report, compare, analyze_into, evaluate_into, branch, resume]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run, and next to it the reader's own files: a letter, a folder, a run."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "letter").write_text(SECRET)
    record_run(foreign_run(outside), range(1, 4))
    return record_run(foreign_run(tmp_path), range(1, 4))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def assert_refused(run: Path, commands: list[Callable[[Path], object]], why: str) -> None:
    before = contents(run.parent / "outside")
    for command in commands:
        assert re.search(why, said(command, run)), command
    assert contents(run.parent / "outside") == before
    for page in (*run.rglob("*.html"), run.parent / "page.html"):
        assert page.is_symlink() or not page.is_file() or SECRET not in page.read_text()


@pytest.mark.parametrize("place", LINKS)
def test_no_command_follows_a_link_out_of_a_run(run: Path, place: str) -> None:
    link = run / place
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(run.parent / LINKS[place], link.parent))
    assert_refused(run, COMMANDS, rf"{place} is a link that leads out of {run}|a link out of its run|no complete check")


@pytest.mark.parametrize("place", ["logs/probes.jsonl", "report/report.html", "evaluations/mine"])
def test_a_fifo_in_a_run_is_refused_without_waiting_for_it(run: Path, place: str) -> None:
    path = run / place
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    assert_refused(run, COMMANDS, f"{path} is neither a file nor a folder")


def test_links_within_a_run_to_a_run_and_to_weights_are_followed(run: Path, tmp_path: Path) -> None:
    (run / "report").mkdir()
    (run / "report" / "evaluations").symlink_to("../evaluations")
    weights = run / "training_state" / "checkpoint-1" / "model.safetensors"
    weights.rename(tmp_path / "weights")
    weights.symlink_to(tmp_path / "weights")
    (run / "logs" / "wandb").mkdir()
    (run / "logs" / "wandb" / "debug.log").symlink_to(tmp_path / "of_the_cache")
    (tmp_path / "named").symlink_to(run)
    for command in (report, compare, evaluate_into, branch):
        assert said(command, tmp_path / "named") == "", command
