"""How commands end: well, or with one line that names the mistake and the way out, and the exit code that says which.

Each command line is train.py in a fork of this process, which has imported everything already.
"""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import rl_training.job.build  # noqa: F401, for the forks
from rl_training.job.explain import explain

ROOT = Path(__file__).parents[1]
SMALL = [
    "trainer.max_steps=2",
    "trainer.num_generations=4",
    "batch.sequences_per_step=32",
    "batch.microbatch_size=4",
    "logger=none",
    "trainer.disable_tqdm=true",
]


@dataclass
class Command:
    """train.py in a process of its own."""

    process: ForkProcess
    log: Path

    @property
    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def end(self) -> int:
        self.process.join(60)
        assert self.process.exitcode is not None, self.lines
        return self.process.exitcode


def start(log: Path, *arguments: str, script: str = "train.py", **env: str) -> Command:
    def run() -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # pytest has its own
        os.environ |= env
        os.chdir(ROOT)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")

    process = ForkProcess(target=run)
    process.start()
    return Command(process, log)


def train(tmp_path: Path, *arguments: str, **env: str) -> Command:
    return start(tmp_path / "log", *SMALL, f"run_dir={tmp_path / 'run'}", *arguments, **env)


# --- one line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sed=1"], "there is no such setting, see python train.py --help; did you mean seed?"),
        (["probe=simpel"], "did you mean simple?"),
        (["probe=simple,gns"], "'probe=[simple,gns]'"),
        (["trainer.max_stepz=3"], "did you mean trainer.max_steps"),
        (["data.path=/a b (1)=2"], """'data.path="/a b (1)=2"'"""),
        (["trainer.lr_scheduler_type=foo"], "foo is not a valid SchedulerType"),
        (["batch.sequences_per_step=31"], "use batch.sequences_per_step=32"),
        (["model=hub"], "model.name is not set"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_with_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    ended = train(tmp_path, *arguments)
    assert ended.end() == 2
    (line,) = ended.lines
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("how", [{"arguments": ["--debug"]}, {"env": {"RL_TRAINING_DEBUG": "1"}}], ids=str)
def test_the_traceback_of_a_foreseen_error_is_shown_on_request(tmp_path: Path, how: dict) -> None:
    ended = train(tmp_path, "seed=-1", *how.get("arguments", []), **how.get("env", {}))
    assert ended.end() == 2
    assert ended.lines[0].startswith("Traceback")
    assert ended.lines[-1] == "error: seed=-1 must be a whole number, at least 0"


def test_an_error_that_was_not_foreseen_keeps_its_traceback_and_ends_with_a_line_too(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("from rl_training.job.command_line import run_command\nrun_command(lambda: [][1])\n")
    ended = start(tmp_path / "log", script=str(script))
    assert ended.end() == 1
    assert ended.lines[0].startswith("Traceback")
    assert ended.lines[-1] == "error: IndexError: list index out of range (not foreseen: the traceback is above)"


def test_of_several_processes_the_first_speaks_and_the_others_wait_to_be_ended(tmp_path: Path) -> None:
    first, second = (start(tmp_path / rank, "seed=-1", RANK=rank, LOCAL_RANK=rank) for rank in "01")
    assert first.end() == 2
    time.sleep(1)
    assert second.lines == []
    second.process.terminate()  # as torchrun does
    assert second.end() == -signal.SIGTERM
    assert second.lines == []


def test_torchrun_finds_the_line_for_its_table_of_failures(tmp_path: Path) -> None:
    assert train(tmp_path, "seed=-1", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json")).end() == 2
    assert "error: seed=-1 must be a whole number" in (tmp_path / "error.json").read_text()


@pytest.mark.parametrize("value", ["/a b", "a=b", "(1)", "[x", "ä", "a,b", 'say "x"', "back\\", 'both\\"', "{", "'"])
def test_the_line_to_type_for_a_path_gives_hydra_that_path(value: str) -> None:
    parser = OverridesParser.create()
    try:
        parser.parse_overrides([f"run_dir={value}"])
    except Exception as error:
        explanation = explain(error)
    else:
        pytest.skip("needs no quotes")
    typed = shlex.split(explanation.split("need quotes: ")[1])
    assert [override.value() for override in parser.parse_overrides(typed)] == [value]


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_the_code_of_shells(tmp_path: Path, signum: int, code: int) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import time\nfrom rl_training.job.command_line import run_command\n"
        "def main():\n    print('ready', flush=True)\n    time.sleep(60)\nrun_command(main)\n"
    )
    command = start(tmp_path / "log", script=str(script))
    while not (command.log.exists() and command.lines):
        time.sleep(0.01)
    os.kill(command.process.pid, signum)
    assert command.end() == code
    assert command.lines == ["ready", f"ended by {signal.Signals(signum).name}"]
