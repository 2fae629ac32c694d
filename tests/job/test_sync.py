"""launch/sync.sh unchanged, between two local folders; tests that need rsync are skipped without it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "sync.sh"
FILES = {
    "config.yaml", "logs/metrics.jsonl", "logs/probes.jsonl", "report/report.html", "evaluations/a/metrics.csv",
    "offline/mixed_probe/checkpoint-2/result.json",
    "training_state/checkpoint-2/model.safetensors", "training_state/checkpoint-4/model.safetensors",
    "logs/.metrics.jsonl.a1b2", "report/report.html.tmp",
}  # fmt: skip
UNFINISHED = {"logs/.metrics.jsonl.a1b2", "report/report.html.tmp"}
CHECKPOINTS = {name for name in FILES if name.startswith("training_state/")}
needs_rsync = pytest.mark.skipif(not shutil.which("rsync"), reason="there is no rsync: apt install rsync")


@pytest.fixture
def run_there(tmp_path: Path) -> Path:
    """Make a run "on another machine": a folder in a folder of runs, with a link that leads out of it."""
    run = tmp_path / "there" / "first run"
    for name in FILES:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name, encoding="utf-8")
    (run / "logs" / "link").symlink_to("/etc/passwd")
    return run


def sync(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_the_script_has_at_most_fifteen_lines() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 15


@needs_rsync
def test_a_run_is_copied_without_checkpoints_links_and_unfinished_files(run_there: Path, tmp_path: Path) -> None:
    assert sync(tmp_path, str(run_there)).returncode == 0
    assert files_in(tmp_path / "runs" / "first run") == FILES - CHECKPOINTS - UNFINISHED


@needs_rsync
def test_syncing_again_copies_changed_files_and_deletes_nothing(run_there: Path, tmp_path: Path) -> None:
    sync(tmp_path, str(run_there))
    (run_there / "config.yaml").unlink()
    with (run_there / "logs" / "metrics.jsonl").open("a") as log:
        log.write("a line more")
    said = sync(tmp_path, str(run_there)).stdout.splitlines()
    assert {name for name in FILES if f"first run/{name}" in said} == {"logs/metrics.jsonl"}
    assert "config.yaml" in files_in(tmp_path / "runs" / "first run")
    assert (tmp_path / "runs" / "first run" / "logs" / "metrics.jsonl").read_text().endswith("a line more")


@needs_rsync
@pytest.mark.parametrize(("pattern", "steps"), [("checkpoint-*", {2, 4}), ("checkpoint-4", {4})])
def test_checkpoints_are_copied_on_request(run_there: Path, tmp_path: Path, pattern: str, steps: set[int]) -> None:
    sync(tmp_path, str(run_there), f"--include={pattern}")
    came = {name for name in files_in(tmp_path / "runs" / "first run") if name.startswith("training_state/")}
    assert came == {f"training_state/checkpoint-{step}/model.safetensors" for step in steps}


@needs_rsync
def test_a_trailing_slash_copies_all_runs_of_a_folder(run_there: Path, tmp_path: Path) -> None:
    shutil.copytree(run_there, run_there.with_name("second"), symlinks=True)
    sync(tmp_path, f"{run_there.parent}/")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"first run", "second"}


@needs_rsync
def test_a_missing_folder_gives_rsyncs_own_error(tmp_path: Path) -> None:
    ended = sync(tmp_path, str(tmp_path / "nowhere"))
    assert ended.returncode != 0
    assert "No such file or directory" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [([], {}, "HOST:RUN_FOLDER"), (["a"], {"PATH": "/nowhere"}, "error: there is no rsync here")],
)
def test_an_incomplete_command_says_what_is_missing(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], line: str
) -> None:
    ended = sync(tmp_path, *arguments, **variables)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert not list(tmp_path.iterdir())
