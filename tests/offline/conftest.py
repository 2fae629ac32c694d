"""Fixtures for each test file: a run with checkpoints, restored and analyzed (analyzed_runs.py)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three steps with a checkpoint at each. Every test file gets its own copy."""
    from analyzed_runs import trained

    return shutil.copytree(trained(tmp_path_factory.getbasetemp()), tmp_path_factory.mktemp("offline") / "run_1")


@pytest.fixture(scope="module")
def restored(run: Path) -> Any:
    from analyzed_runs import restored_at

    return restored_at(run, 1)


@pytest.fixture(scope="module")
def analyzed(restored: Any) -> Any:
    from analyzed_runs import SMALL

    from rl_training.offline.analysis import analyze

    return analyze(restored, SMALL)
