"""With the package installed, verl's own command runs probes: verl loads its plugin."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.workers")

from whole_loop import environment, settings

CHOICE = ["trainer.v1.trainer_mode=sync_with_probes", "+probe=[simple,gns]", "probes.simple.every=4"]


def python(*arguments: str, folder: Path) -> Any:
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment(), capture_output=True, text=True)


def test_verls_own_command_composes_the_chosen_probes(tmp_path: Path) -> None:
    assert [point.value for point in entry_points(group="verl.plugins") if point.name == "rl_training"]
    command = ("-m", "verl.trainer.main_ppo", *settings(tmp_path, 1), *CHOICE, "--cfg", "job")
    ended = python(*command, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    chosen = ended.stdout[ended.stdout.index("\nprobes:") :]
    assert "every: 4" in chosen
    assert "GradientNoiseScaleProbe" in chosen


def test_the_trainer_is_found_by_its_name_and_verls_other_trainers_are_unchanged(tmp_path: Path) -> None:
    lookup = "import verl; from verl.trainer.ppo.v1 import get_trainer_cls as cls"
    lookup += "; print(cls('sync_with_probes').__module__, cls('sync').__module__)"
    ended = python("-c", lookup, folder=tmp_path)
    assert ended.stdout.split() == ["rl_training.hosts.verl.trainer", "verl.trainer.ppo.v1.trainer_sync"], ended.stderr
