"""Commands end well, or with one line that names the mistake and the fix, and with a matching exit code.

Each command line runs train.py in a fork of this process, which has already imported everything.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

import forks
import pytest
import transformers.integrations
import yaml
from configs import QUICK, composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import rl_training.__main__ as package
import rl_training.job.run.training  # noqa: F401, for the forks
from rl_training.errors import UserError
from rl_training.job.commands import fast_imports
from rl_training.job.configuration.hydra_errors import explain
from rl_training.job.errors import Interrupted, as_user_errors, format_error
from rl_training.job.run.folder import open_run_folder, save_config
from rl_training.records.checkpoint_flaws import find_flaw
from rl_training.records.files.lock import locked
from rl_training.records.folder import TRAINING_STATE
from rl_training.records.jsonl import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[2]
PRINTS = "transformers.integrations.integration_utils"
SMALL = [*QUICK, "trainer.max_steps=2"]


@dataclass
class Command:
    """train.py in a separate process."""

    process: ForkProcess
    log: Path

    @property
    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def end(self) -> int:
        self.process.join(60)
        assert self.process.exitcode is not None, self.lines
        return self.process.exitcode


def start(log: Path, *arguments: str, script: str = "train.py", folder: Path = ROOT, **env: str) -> Command:
    def run() -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # pytest replaces these
        os.environ |= env
        os.chdir(folder)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")

    process = ForkProcess(target=run)
    process.start()
    return Command(process, log)


def wait_for(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def train(tmp_path: Path, *arguments: str, **env: str) -> Command:
    return start(tmp_path / "log", *SMALL, f"run_dir={tmp_path / 'run'}", *arguments, **env)


OWN = """
import pathlib, time
from rl_training import Estimate, Probe, Reading
from rl_training.tasks.arithmetic import arithmetic

class Mine(Probe):
    name = "mine"
    def measure(self, ctx, state):
        return Reading(measured={"mine/five": Estimate(5.0)})

class Waiting(Probe):
    name = "waiting"
    def measure(self, ctx, state):
        pathlib.Path("waiting").touch()
        time.sleep(60)

def task():
    return arithmetic(num_train=16)
"""


def train_with_own(tmp_path: Path, *arguments: str) -> Command:
    """Train with the code in OWN, written to a file in the working folder."""
    (tmp_path / "my_file.py").write_text(OWN, encoding="utf-8")
    words = [*SMALL, *arguments, "run_dir=run"]
    return start(tmp_path / "log", *words, script=str(ROOT / "train.py"), folder=tmp_path)


# --- one line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [  # for other mistakes see refused.yaml
        (["data.path=/a b (1)=2"], """'data.path="/a b (1)=2"'"""),
        (["~trainer"], "full_key: trainer."),
        (["model=null"], "model=null: give a name, or names as in 'model=[hub]': hub, qwen"),
        (["probe=[simple,null]"], "probe=[simple,null]: give a name, or names as in 'probe=[all]': all, cov"),
        (["probe={a:1}"], "probe={a:1}: give a name, or names as in 'probe=[all]': all, cov"),
        (["resume=auto", "run_dir='runs/${now:%H-%M}'"], "but run_dir is named by the time: give run_dir=PATH"),
        (["run_dir=null"], "run_dir=None is not a folder"),
        (["probe=simple,gns"], "To use it as a list, use key=[value1,value2]"),
        (
            ["trainer.learning_rate=1e10"],
            " 2: the policy's probabilities are nan: training has diverged. Most likely trainer.learning_rate=1e+10",
        ),
        (
            ["trainer.learning_rate=1e10", "buffer=filtered", "probe=none"],
            "lower it; training has failed after 1 step (UserError); the report: ",
        ),
    ],
)
def test_a_users_mistake_is_reported_in_one_line_with_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    ended = train(tmp_path, *arguments)
    assert ended.end() == 2
    assert ended.lines[-1].startswith("error: ")
    assert message in ended.lines[-1]
    assert "Traceback" not in "\n".join(ended.lines)
    page = tmp_path / "run" / "report" / "report.html"  # exists only if a training took steps
    assert (f"; training has failed after 1 step (UserError); the report: {page}" in ended.lines[-1]) == page.exists()


@pytest.mark.parametrize("how", [{"arguments": ["--debug"]}, {"env": {"RL_TRAINING_DEBUG": "1"}}], ids=str)
def test_the_traceback_of_an_expected_error_is_shown_on_request(tmp_path: Path, how: dict) -> None:
    ended = train(tmp_path, "seed=-1", *how.get("arguments", []), **how.get("env", {}))
    assert ended.end() == 2
    assert ended.lines[0].startswith("Traceback")
    assert ended.lines[-1] == "error: seed=-1 must be at least 0 and at most 4294967295"


def test_an_unexpected_error_keeps_its_traceback_and_ends_with_a_line_too(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("from rl_training.job.errors import run_command\nrun_command(lambda: [][1])\n")
    ended = start(tmp_path / "log", script=str(script))
    assert ended.end() == 1
    assert ended.lines[0].startswith("Traceback")
    assert ended.lines[-1] == "error: IndexError: list index out of range (unexpected: the traceback is above)"


def test_the_error_line_includes_the_notes_of_the_exception() -> None:
    error = KeyError("answer")
    error.add_note("reward function graded failed (own.py:3)")
    assert format_error(error) == "KeyError: 'answer'; reward function graded failed (own.py:3)"


@pytest.mark.parametrize(
    "mistake",
    [
        "import rl_training; rl_training.Estimate(float('nan'))",  # a ValueError raised by the package
        "from rl_training.job.configuration.overrides import root_key; root_key(5)",
    ],
)
def test_a_bug_of_the_package_is_not_reported_as_the_users_mistake(tmp_path: Path, mistake: str) -> None:
    """Not even where commands treat errors raised by libraries as the user's mistakes."""
    script = tmp_path / "fails.py"
    lines = ["from rl_training.job.errors import as_user_errors, run_command", "def main():"]
    lines += ["    with as_user_errors():", f"        {mistake}", "run_command(main)"]
    script.write_text("\n".join(lines))
    ended = start(tmp_path / "log", script=str(script))
    assert ended.end() == 1
    assert ended.lines[0].startswith("Traceback")
    assert ended.lines[-1].endswith(" (unexpected: the traceback is above)")


def test_a_library_error_before_the_first_step_is_reported_as_the_users_mistake() -> None:
    said = r"^JSONDecodeError: Expecting value.* \(--debug shows where\)$"
    with pytest.raises(UserError, match=said), as_user_errors():
        json.loads("")
    with pytest.raises(json.JSONDecodeError), as_user_errors(unless=lambda: True):
        json.loads("")


def test_a_programming_error_is_never_reported_as_the_users_mistake() -> None:
    with pytest.raises(TypeError), as_user_errors():
        json.loads(object())


@pytest.mark.parametrize(("rank", "is_printed"), [("0", True), ("1", False)])
def test_launched_processes_pass_the_error_line_to_the_launcher_and_the_main_one_prints_it(
    tmp_path: Path, rank: str, is_printed: bool
) -> None:
    handed = tmp_path / "error.json"
    ended = train(tmp_path, "seed=-1", RANK=rank, LOCAL_RANK=rank, TORCHELASTIC_ERROR_FILE=str(handed))
    assert ended.end() == 2
    line = "error: seed=-1 must be at least 0 and at most 4294967295"
    assert ended.lines == [line] * is_printed
    failure = ProcessFailure(int(rank), 1, 2, str(handed))  # this is how the launcher reads it
    assert line in str(ChildFailedError("train.py", {int(rank): failure}))


def test_a_process_without_a_launcher_prints_its_error_line_at_any_rank(tmp_path: Path) -> None:
    ended = train(tmp_path, "seed=-1", RANK="1", LOCAL_RANK="1")
    assert ended.end() == 2
    assert len(ended.lines) == 1


@pytest.mark.parametrize("value", ["/a b", "a=b", "(1)", "[x", "ä", "a,b", 'say "x"', "back\\", 'both\\"', "{", "'"])
def test_the_suggested_quoting_of_a_path_gives_hydra_that_path(value: str) -> None:
    parser = OverridesParser.create()
    try:
        parser.parse_overrides([f"run_dir={value}"])
    except Exception as error:
        explanation = explain(error, "train")
    else:
        pytest.skip("needs no quotes")
    typed = shlex.split(explanation.split("need quotes: ")[1])
    assert [override.value() for override in parser.parse_overrides(typed)] == [value]


def test_garbage_collection_is_enabled_again_after_a_failed_import() -> None:
    with pytest.raises(ImportError), fast_imports():
        import no_such_library  # noqa: F401
    assert gc.isenabled()


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_the_code_of_shells(tmp_path: Path, signum: int, code: int) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import time\nfrom rl_training.job.errors import run_command\n"
        "def main():\n    print('ready', flush=True)\n    time.sleep(60)\nrun_command(main)\n"
    )
    command = start(tmp_path / "log", script=str(script))
    wait_for(lambda: command.log.exists() and command.lines)
    os.kill(command.process.pid, signum)
    assert command.end() == code
    assert command.lines == ["ready", f"ended by {signal.Signals(signum).name}"]


def test_a_command_whose_reader_has_gone_ends_without_a_word(tmp_path: Path) -> None:
    script = tmp_path / "writes.py"
    script.write_text(
        "from rl_training.job.errors import run_command\nrun_command(lambda: print('line\\n' * 100_000))\n"
    )
    writer = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.readline()
    writer.stdout.close()
    assert (writer.stderr.read(), writer.wait()) == (b"", 128 + signal.SIGPIPE)


def test_a_letter_that_the_terminals_encoding_lacks_ends_no_command(tmp_path: Path) -> None:
    code = "from rl_training.job.errors import run_command; run_command(lambda: print('δH'))"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert ended.stdout == b"?H\n"
    assert ended.returncode == 0, ended.stderr


def test_a_signal_in_training_finishes_the_step_and_says_how_to_resume(tmp_path: Path) -> None:
    """This is Ctrl-C. For SIGTERM see the test below of a launcher that is gone."""
    run = tmp_path / "run"
    command = train(tmp_path, "trainer.max_steps=500", "probe=none", "trainer.save_steps=1000")
    wait_for(lambda: (run / "logs" / METRICS_FILE).exists())
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end() == 130, command.lines
    taken = len(read_metrics(run / "logs"))
    assert 1 <= taken < 500
    (checkpoint,) = (run / TRAINING_STATE).glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{taken}"
    assert find_flaw(checkpoint) == ""
    assert (run / "report" / "report.html").is_file()
    assert "Traceback" not in "\n".join(command.lines)
    ended, words = command.lines[-1].split("; to continue, repeat the command with this appended: ")
    assert ended == f"ended by SIGINT after step {taken} of 500"
    typed = [*SMALL, f"run_dir={run}", "trainer.max_steps=500", "probe=none", *shlex.split(words)]
    resumed = start(tmp_path / "again", *typed, f"trainer.max_steps={taken + 1}")
    assert resumed.end() == 0, resumed.lines
    assert not [line for line in resumed.lines if "missing keys" in line]  # about a tied head
    assert [row["step"] for row in read_metrics(run / "logs")] == [*range(1, taken + 2)]
    elsewhere = start(tmp_path / "elsewhere", *SMALL, f"resume={run}", f"++run_dir={tmp_path / 'other'}")
    assert elsewhere.end() == 2
    assert elsewhere.lines[-1].endswith("leave run_dir out")


def test_a_second_signal_ends_training_at_once(tmp_path: Path) -> None:
    command = train_with_own(tmp_path, "probe=none", "+probes.waiting._target_=my_file.Waiting")
    wait_for((tmp_path / "waiting").exists)
    os.kill(command.process.pid, signal.SIGTERM)
    wait_for(lambda: any("a second signal ends at once" in line for line in command.lines))
    os.kill(command.process.pid, signal.SIGTERM)  # at the same moment, like a launcher that passes on the signal
    time.sleep(2.5)
    asked_again = time.monotonic()
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.end() == 143
    assert time.monotonic() - asked_again < 2
    assert command.lines[-1] == "ended by SIGTERM"
    assert not list((tmp_path / "run" / TRAINING_STATE).glob("checkpoint-*"))


def test_a_launcher_that_dies_leaves_no_orphan_process(tmp_path: Path) -> None:
    def launch() -> None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        command = train(tmp_path, "trainer.max_steps=5000", "probe=none", "trainer.save_steps=1000")
        (tmp_path / "pid").write_text(str(command.process.pid))
        command.process.join()

    launcher = ForkProcess(target=launch)
    launcher.start()
    wait_for(lambda: (tmp_path / "run" / "logs" / METRICS_FILE).exists())
    launcher.kill()
    launcher.join()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[-1].startswith("ended by SIGTERM after step")


# --- what a run folder holds ------------------------------------------------------------------------------------------


def test_a_probe_and_a_task_in_a_file_of_the_working_folder_are_found(tmp_path: Path) -> None:
    overrides = [
        "probe=none",
        "+probes.mine._target_=my_file.Mine",
        "data._target_=my_file.task",
        "trainer.max_steps=1",
    ]
    command = train_with_own(tmp_path, *overrides)
    assert command.end() == 0, command.lines
    assert read_metrics(tmp_path / "run" / "logs")[0]["mine/five"] == 5


@pytest.mark.parametrize("moment", [(yaml, "dump"), (os, "fsync")], ids=["before", "in the middle"])
def test_a_run_interrupted_while_writing_its_config_leaves_none_and_can_restart(
    tmp_path, monkeypatch, moment: tuple[object, str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> str:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(*moment, interrupted)
    with pytest.raises(Interrupted):
        save_config({"seed": 1}, tmp_path, is_resumed=False)
    assert list(tmp_path.glob("[!.]*")) == []
    monkeypatch.undo()
    save_config({"seed": 1}, tmp_path, is_resumed=False)
    assert [path.read_text() for path in tmp_path.glob("[!.]*")] == ["seed: 1\n"]
    with pytest.raises(ValueError, match=rf"^run_dir={tmp_path} .*resume=latest"):
        save_config({"seed": 2}, tmp_path, is_resumed=False)
    save_config({"seed": 2}, tmp_path, is_resumed=True)
    assert [path.read_text() for path in tmp_path.glob("[!.]*")] == ["seed: 2\n"]


@pytest.mark.parametrize(("typed", "meant"), {"trian": "train", "compare": "report", "evalute": "evaluate"}.items())
def test_an_unknown_command_is_answered_with_the_closest_one(capsys, monkeypatch, typed, meant) -> None:
    monkeypatch.setattr(package, "_leave_out_working_folder", lambda: None)  # it would change this process
    monkeypatch.setattr(sys, "argv", ["rl-training", typed, "runs/a", "runs/b"])
    with pytest.raises(SystemExit) as ended:
        package.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: there is no command {typed}, see rl-training --help; did you mean {meant}: ")
    assert said.count("\n") == 1


def test_only_one_of_two_concurrent_runs_in_a_folder_trains(tmp_path: Path) -> None:
    both = [
        start(tmp_path / f"log{i}", *SMALL, "probe=none", f"run_dir={tmp_path / 'run'}", f"seed={i}") for i in (1, 2)
    ]
    assert sorted(command.end() for command in both) == [0, 2]
    refused = next(command for command in both if command.end() == 2)
    said = (f"run_dir={tmp_path / 'run'} already holds a run", f"{tmp_path / 'run'} is being written to by process ")
    assert refused.lines[-1].removeprefix("error: ").startswith(said)
    seed = both.index(refused) % 2 * -1 + 2  # the other run's seed
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert config.startswith("made_by: job\n")
    assert f"seed: {seed}" in config
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "logs")] == [1, 2]


def test_a_second_resumed_run_in_a_folder_ends_in_one_line_while_the_first_lives(tmp_path: Path) -> None:
    """Slurm may restart a job while the first one is still ending: it neither trains concurrently nor waits."""
    words = ["resume=auto", "probe=none"]
    first = train_with_own(tmp_path, *words, "+probes.waiting._target_=my_file.Waiting")
    wait_for((tmp_path / "waiting").exists)
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for resume in ("auto", "latest"):
        second = start(tmp_path / "log2", *SMALL, f"resume={resume}", "probe=none", f"run_dir={tmp_path / 'run'}")
        assert second.end() == 2
        (line,) = second.lines
        holder = f"is being written to by process {first.process.pid} on {os.uname().nodename} since "
        assert line.startswith(f"error: {tmp_path / 'run'} {holder}"), line
    assert kept == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    first.process.kill()
    first.process.join()
    third = train_with_own(tmp_path, *words)
    assert third.end() == 0, third.lines
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "logs")] == [1, 2]


def lock_refuses(rank: int, run: str) -> None:
    cfg = composed("train", f"run_dir={run}", "resume=auto", *SMALL)
    with pytest.raises(ValueError, match=rf"^{run} .*\bprocess \d+ on {os.uname().nodename} "):
        open_run_folder(cfg)


def test_every_process_of_a_launch_ends_where_the_folder_is_locked(tmp_path: Path) -> None:
    """Only the main process checks the lock; without care the others would wait for it."""
    with locked(tmp_path / "run", ""):
        forks.start_ranks(lock_refuses, (str(tmp_path / "run"),), 2)


def test_a_tilde_is_expanded_and_tokens_are_masked(tmp_path: Path) -> None:
    command = start(
        tmp_path / "log", *SMALL, "trainer.max_steps=1", "probe=none", 'run_dir="~/run"',
        "trainer.hub_token=hf_verysecret", HOME=str(tmp_path),
    )  # fmt: skip
    assert command.end() == 0, command.lines
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"config.yaml", "metrics.jsonl", "report.html", "training_args.bin"}
    for path in written:
        assert b"verysecret" not in path.read_bytes(), path
    assert "hub_token: '***'" in (tmp_path / "run" / "config.yaml").read_text()


HELP = """
import importlib, sys
from rl_training.__main__ import COMMANDS

for name, (module, function, _) in COMMANDS.items():
    sys.argv = [name, "--help"]
    try:
        getattr(importlib.import_module(module), function)()
    except SystemExit as ended:
        assert not ended.code, name
    slow = {"torch", "transformers", "pandas", "datasets", "wandb"} & sys.modules.keys()
    assert not slow, (name, slow)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report"], "the following arguments are required: RUN; see rl-training report --help"),
        (["report", "r", "--watch", "0"], "--watch takes seconds, 1 or more; see rl-training report --help"),
        (["kernel"], "the following arguments are required: folders; see rl-training kernel --help"),
        (["dashboard", "r"], "unrecognized arguments: r; see rl-training dashboard --help"),
        (["launch-file", "slurm"], "argument NAME: invalid choice: 'slurm' "),
        (["config", "train"], "unrecognized arguments: train; see rl-training config --help"),
    ],
)
def test_a_mistyped_argument_of_any_command_is_told_in_one_line(monkeypatch, words: list[str], said: str) -> None:
    monkeypatch.setattr(sys, "argv", words)
    module, function, _ = package.COMMANDS[words[0]]
    with pytest.raises(UserError) as raised:
        getattr(importlib.import_module(module), function)()
    assert str(raised.value).startswith(said)


def test_no_command_help_waits_for_a_slow_import() -> None:
    ended = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert ended.stderr == ""


def test_importing_prints_nothing_about_wandb_being_offline(monkeypatch, capsys) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(transformers.integrations, PRINTS.rpartition(".")[2], None)  # restored at the end
    for context, said in ((fast_imports(), ""), (contextlib.nullcontext(), "[INFO] Running in WANDB offline mode\n")):
        monkeypatch.delitem(sys.modules, PRINTS)
        with context:
            assert importlib.import_module(PRINTS).WandbCallback
        assert capsys.readouterr().out == said
