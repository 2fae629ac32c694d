"""Code in the working folder is imported only if the command names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from configs import composed
from foreign_runs import TOUCH

from rl_training.job.configuration.custom_code import add_custom_code_to_path

PLANTED = ("hydra", "omegaconf", "yaml", "shlex", "json", "peft", "torch", "rich", "hydra_plugins/evil/__init__")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with modules that are named like libraries and would create a canary file."""
    folder = tmp_path / "here"
    for name in PLANTED:
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TOUCH.format(canary=tmp_path / "canary"))
    (folder / "a_task_of_mine.py").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return folder


@pytest.mark.parametrize("words", [["train", "seed=x"], ["report", "nowhere"]])
def test_no_module_of_the_working_folder_shadows_a_library(folder: Path, words: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rl_training", *words], capture_output=True, text=True, check=False, cwd=folder
    )
    assert ended.returncode == 2, ended.stderr
    assert not (folder.parent / "canary").exists()


def test_child_processes_exclude_the_working_folder_from_the_path_too(folder: Path) -> None:
    """For example the processes that evaluate a checkpoint."""
    program = (
        "import os, sys; sys.argv = ['rl-training', '--version']\n"
        "from rl_training.__main__ import _leave_out_working_folder\n"
        "_leave_out_working_folder()\n"
        "import subprocess; subprocess.run([sys.executable, '-c', 'import json, shlex'], check=True)\n"
        "import multiprocessing; multiprocessing.get_context('forkserver').Process(target=print).start()\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, cwd=folder)
    assert not (folder.parent / "canary").exists()


@pytest.mark.parametrize("words", [
    ["data._target_=a_task_of_mine.task"], ["+probes.mine._target_=a_task_of_mine.Probe"],
    ["intervention=a_task_of_mine:f"], ["intervention=a_task_of_mine.py:f:0.5"],
    ["intervention=[psr,a_task_of_mine:f]"], ["probe=interventions", "probes.interventions.which=[a_task_of_mine:f]"],
])  # fmt: skip
def test_code_named_on_the_command_line_is_found_in_the_working_folder(folder: Path, words: list[str]) -> None:
    """It is searched after installed packages."""
    add_custom_code_to_path(composed("train", *words))
    assert sys.path[-1] == str(folder)


def test_built_in_targets_are_never_looked_up_in_the_working_folder(folder: Path) -> None:
    add_custom_code_to_path(composed("train", "adapter=lora", "probe=all", "intervention=psr"))
    assert str(folder) not in sys.path


@pytest.mark.parametrize("file", ["config.yaml", "logs/metrics.jsonl"])
def test_custom_code_cannot_come_from_a_run_folder_or_shadow_a_library(folder: Path, file: str) -> None:
    with pytest.raises(ValueError, match=rf"peft\.IA3Config: .*{folder}"):
        add_custom_code_to_path(composed("train", "adapter=lora", "adapter._target_=peft.IA3Config"))
    (folder / "logs").mkdir()
    (folder / file).touch()
    with pytest.raises(ValueError, match=rf"a_task_of_mine\.task: .*\brun, .*{folder}"):
        add_custom_code_to_path(composed("train", "data._target_=a_task_of_mine.task"))
    assert str(folder) not in sys.path
