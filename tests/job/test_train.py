"""The user's command lines as typed end well, or name the mistake and keep what was written."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from configs import QUICK, assert_silent, launched_program

from rl_training.records.jsonl import read_estimates, read_metrics

ROOT = Path(__file__).parents[2]
SILENCE = "rl_training.job.silence"
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
PROGRAMS = [path.relative_to(ROOT) for path in BENCHMARKS if "__main__" in path.read_text(encoding="utf-8")]
SMALL = [*QUICK, "trainer.max_steps=2"]


def train(*overrides: str) -> subprocess.CompletedProcess[str]:
    return forks.run("train.py", *overrides)


def test_the_training_job_trains_measures_and_reports(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["probe=simple", *SMALL, "logger=tensorboard", "++trainer.disable_tqdm=false", f"run_dir={folder}"]
    program, env = launched_program("--config_file", "launch/cpu.yaml", "train.py", *options)
    launched = forks.run(*program, env=env)
    assert launched.returncode == 0, launched.stderr
    assert [row["step"] for row in read_metrics(folder / "logs")] == [1, 2]
    forward = [row for row in read_estimates(folder / "logs") if row["name"] == "delta_h/forward"]
    assert [row["step"] for row in forward] == [1, 2]
    assert all(row["stderr"] > 0 and row["world_size"] == 1 for row in forward)
    assert "<img" in (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert "predicted" in launched.stdout
    assert "δH=" in launched.stderr  # the progress bar
    assert_silent(launched.stdout + launched.stderr)
    assert list((folder / "logs" / "tensorboard").glob("events*"))


def test_a_job_of_two_processes_leaves_one_run(tmp_path: Path) -> None:
    forks.run_on_ranks(("train.py", *SMALL, f"run_dir={tmp_path / 'run'}"), 2)
    rows = read_estimates(tmp_path / "run" / "logs")
    assert {row["world_size"] for row in rows} == {2}
    forward = [row for row in rows if row["name"] == "delta_h/forward"]
    first, second = (row["num_samples"] for row in forward)
    assert first == 8  # four microbatches on each of two ranks
    assert 8 <= second <= 15  # the average of two steps' variances, with 7 degrees of freedom each
    assert all(row["stderr"] > 0 for row in forward)


def test_help_lists_the_choices() -> None:
    shown = train("--help")
    assert shown.returncode == 0
    groups = ("adapter: lora, none", "buffer: filtered, plain", "data: arithmetic, gsm8k")
    for word in (*groups, "trainer.max_steps=", "resume=latest", "run_dir="):
        assert word in shown.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_benchmark_has_help_and_silences_libraries_before_importing_them(program: Path) -> None:
    shown = forks.run(str(program), "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage:")
    assert shown.stderr == ""
    body = ast.parse((ROOT / program).read_text(encoding="utf-8")).body
    imported = [node.names[0].name if isinstance(node, ast.Import) else node.module
                for node in body if isinstance(node, ast.Import | ast.ImportFrom)]  # fmt: skip
    assert next(name for name in imported if name.split(".")[0] not in sys.stdlib_module_names) == SILENCE
