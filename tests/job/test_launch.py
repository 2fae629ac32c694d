"""How a process was started, as it was typed; and a line below what the launcher has to say."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rl_training.job.command_line import Launch

LAUNCHER = """
import subprocess, sys
code = subprocess.call([sys.executable, *sys.argv[sys.argv.index("script.py"):]])
print(f"launcher: exit {code}", file=sys.stderr)
"""
SCRIPT = """
import sys
from rl_training.job.command_line import Launch, run_command
from rl_training.job.explain import check_allowed
def main():
    check_allowed(Launch.of_this_process().typed, 0, "int [1, inf)")
run_command(main)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a launcher, an executable of that name as pip installs them, and a script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = tmp_path / "accelerate"
    launcher.write_text(f"#!{sys.executable}\n{LAUNCHER}")
    launcher.chmod(0o755)
    return tmp_path


def said_on_a_terminal(folder: Path, *command: str) -> list[str]:
    ours, theirs = pty.openpty()
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "ACCELERATE_MIXED_PRECISION": "no"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    process.wait()  # as a shell does: until then the launcher would count as there
    said = b""
    while b"error: " not in said:
        said += os.read(ours, 4096)
    os.close(ours)
    return [line for line in said.decode().splitlines() if line.strip()]


def test_on_a_terminal_the_line_is_the_last_and_names_the_launcher_as_it_was_typed(folder: Path) -> None:
    said = said_on_a_terminal(folder, "accelerate", "launch", "--config_file", "my file.yaml", "script.py", "a=1")
    assert said == [
        "launcher: exit 2", "error: accelerate launch --config_file 'my file.yaml' script.py=0 must be at least 1"
    ]  # fmt: skip


def test_without_a_terminal_the_line_is_printed_at_once(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "ACCELERATE_MIXED_PRECISION": "no"}
    command = [str(folder / "accelerate"), "launch", "script.py"]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    line = f"error: {folder / 'accelerate'} launch script.py=0 must be at least 1"  # not on the PATH, hence in full
    assert ended.stderr.splitlines() == [line, "launcher: exit 2"]


@pytest.mark.parametrize(
    ("typed", "argv"),
    [
        (["python3", "-u", "train.py"], "train.py"),
        (["python3", "-m", "rl_training", "train"], "train"),
        (["/env/bin/rl-training", "train"], "train"),
    ],
)
def test_without_a_launcher_it_is_the_command_line_up_to_the_first_setting(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], argv: str
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(sys, "argv", [argv, "++trainer.max_steps=1"])
    interpreter = [] if typed[0] == "python3" else ["/env/bin/python3"]  # the kernel puts it before a script
    monkeypatch.setattr(sys, "orig_argv", [*interpreter, *typed, "trainer.max_steps=1"])
    assert Launch.of_this_process() == Launch(None, " ".join(typed))
