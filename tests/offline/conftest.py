"""A run with checkpoints, restored and analysed, for the tests of a file (analysed_runs.py)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, each with its checkpoint; each file that analyses it has a copy of its own."""
    from analysed_runs import trained

    return shutil.copytree(trained(tmp_path_factory.getbasetemp()), tmp_path_factory.mktemp("offline") / "run_1")


@pytest.fixture(scope="module")
def restored(run: Path) -> Any:
    from analysed_runs import restored_at

    return restored_at(run, 1)


@pytest.fixture(scope="module")
def analysed(restored: Any) -> Any:
    from analysed_runs import SMALL

    from rl_training.offline.probe import analyse

    return analyse(restored, SMALL)
