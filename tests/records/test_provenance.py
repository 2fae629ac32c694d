"""Claims on a run's provenance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_training.records.provenance import _commit, provenance
from rl_training.version import VERSION


def test_provenance_names_version_commit_command_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/train.py", "seed=1", "name=a b"])
    told = provenance()
    assert told["version"] == VERSION
    assert told["command"] == "train.py seed=1 'name=a b'"
    assert f"torch {torch.__version__.split('+')[0]}" in told["libraries"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert told["commit"].startswith(head.stdout.strip())


def test_an_installed_package_has_no_commit_of_the_project_around_it(tmp_path: Path) -> None:
    installed = tmp_path / ".venv" / "records"
    installed.mkdir(parents=True)
    for name in ("project.py", ".venv/records/provenance.py"):
        (tmp_path / name).write_text("")
    for words in (["init", "-q"], ["add", "project.py"], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.email=a@b", "-c", "user.name=a", *words], cwd=tmp_path, check=True)
    assert _commit(installed, "provenance.py") == ""
    assert _commit(installed) == _commit(tmp_path, "project.py") != ""


def test_provenance_names_the_imported_version_of_a_library_installed_twice(tmp_path, monkeypatch) -> None:
    """That is the version found first on the path."""
    told = provenance()["libraries"]
    later = tmp_path / "torch-0.1.dist-info"
    later.mkdir()
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert provenance()["libraries"] == told


def test_a_secret_token_on_the_command_line_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "trainer.hub_token=hf_abc", "+api_key=xyz", "seed=1"])
    assert provenance()["command"] == "train.py 'trainer.hub_token=***' '+api_key=***' seed=1"
