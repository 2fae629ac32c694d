"""`python -m rl_training.attach SCRIPT.py` runs a script as Python does, and attaches every GRPOTrainer in it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest

import rl_training
import rl_training.hosts.trl
from rl_training.hosts.after_import import after_import
from rl_training.hosts.trl import launcher
from rl_training.hosts.trl.launcher import OWN_PROBES
from rl_training.hosts.trl.options import options_of_attach
from rl_training.models.load import TINY_PATH
from rl_training.records.jsonl import read_estimates

LAUNCHER = "rl_training/attach.py"
WITHOUT_TRAINING = """
import os, pickle, signal, sys

class Own:
    size: int = 0

def fail():
    raise ValueError("of the script")

print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), sys.modules["__main__"].Own is Own, Own.__annotations__)
pickle.loads(pickle.dumps(Own()))
assert not {"torch", "trl", "transformers"} & sys.modules.keys()
if sys.argv[-1] == "fails":
    fail()
if sys.argv[-1] == "exits":
    sys.exit(7)
if sys.argv[-1] == "is interrupted":
    raise KeyboardInterrupt
if sys.argv[-1] == "is told to end":
    os.kill(os.getpid(), signal.SIGTERM)
"""
TRAINING = """
import sys
import torch
from trainers import FEW, trainer_maker, trained_weights
from pathlib import Path
from trl import GRPOConfig, GRPOTrainer
from rl_training import attach

kind, folder = sys.argv[1], Path(sys.argv[2])

class Preparing(GRPOTrainer):
    prepared = 0

    def train(self, *args, **kwargs):
        Preparing.prepared += 1
        return super().train(*args, **kwargs)

class OwnLoss(GRPOTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return 2.0 * super().compute_loss(model, inputs, *args, **kwargs)

def trainer(of=GRPOTrainer):
    return trainer_maker(folder)(of, config_class=GRPOConfig, use_cpu=True, bf16=False, **FEW, max_steps=1)

if kind == "two trainers":
    trainer().train()
trained = trainer({"a subclass": Preparing, "a loss of its own": OwnLoss}.get(kind, GRPOTrainer))
if kind == "it attaches already":
    trainer_maker(folder)(**FEW, max_steps=1).train()  # DrGRPOTrainer, which has probes= and records=
    attach(trained, folder / "own", "ess")
trained.train()
assert kind != "a subclass" or Preparing.prepared == 1
assert [name for name in vars(trained) if name == "train"] == []
print("weights", float(trained_weights(trained).abs().sum()))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train_it.py").write_text(TRAINING)
    return tmp_path / "train_it.py"


# --- as Python runs it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["works", "fails", "exits", "is interrupted", "is told to end", "is no Python"])
def test_a_script_has_the_output_traceback_and_exit_code_that_python_gives_it(tmp_path: Path, case: str) -> None:
    script = tmp_path / "without_training.py"
    script.write_text("def :" if case == "is no Python" else WITHOUT_TRAINING)
    python, launched = (
        subprocess.run([sys.executable, *start, script, "--lr", case], cwd=tmp_path, capture_output=True, text=True)
        for start in ([], ["-m", "rl_training.attach", "--folder", "run"])
    )
    assert (launched.returncode, launched.stdout) == (python.returncode, python.stdout)
    of_launcher = [line for line in launched.stderr.splitlines() if line.startswith("rl-training:")]
    assert [line for line in launched.stderr.splitlines() if line not in of_launcher] == python.stderr.splitlines()
    assert [("nothing was measured" in line) for line in of_launcher] == [True] * (case == "works")
    assert not (tmp_path / "run").exists()


def test_a_module_of_a_package_has_the_output_that_python_gives_it(tmp_path: Path) -> None:
    package = tmp_path / "recipes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "grpo.py").write_text(WITHOUT_TRAINING + "\nprint(__package__, __spec__.name)\n")
    python, launched = (
        subprocess.run([sys.executable, *start, "-m", "recipes.grpo", "-m", "x"], cwd=tmp_path, capture_output=True)
        for start in ([], ["-m", "rl_training.attach"])
    )
    assert python.returncode == launched.returncode == 0
    assert launched.stdout == python.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["missing.py"], "the script missing.py cannot be read: No such file or directory"),
        (["-m", "missing_module"], "the module missing_module cannot be found"),
        ([], "which script? Give SCRIPT.py, or -m MODULE"),
        (["--probe", "ess", "missing.py"], "unrecognized arguments: --probe"),
        (["--probes", "ess,entropy", "train_it.py"], "'entropy' names no probe: there are simple"),
        (["--target-kl-share", "-1", "train_it.py"], "target_kl_share='-1'"),
        (["--folder", f"{__file__}/run", "train_it.py"], "test_launcher.py is not a folder that can be written"),
    ],
)
def test_mistakes_end_before_training_with_one_line(script: Path, given: list[str], said: str) -> None:
    of_script = [str(script), "a trainer", str(script.parent)]
    ended = forks.run(LAUNCHER, *(given[:-1] + of_script if given[-1:] == [script.name] else given))
    assert ended.returncode == 2
    assert said in ended.stderr.splitlines()[-1]


def test_a_function_is_called_once_the_module_is_imported_and_not_before(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []
    finders = [*sys.meta_path]
    after_import("imported_later", lambda module: seen.append(module.value))
    assert seen == []
    assert importlib.util.find_spec("imported_later") is not None  # looked for and not imported, as by a check for it
    assert seen == []
    module: Any = importlib.import_module("imported_later")
    assert (seen, module.value, sys.meta_path) == ([3], 3, finders)
    after_import("imported_later", lambda module: seen.append(module))
    assert seen == [3, module]


def test_attach_stays_the_function_when_the_module_of_this_name_is_imported() -> None:
    module = importlib.import_module("rl_training.attach")
    from rl_training import attach

    assert module is attach is rl_training.attach is rl_training.hosts.trl.attach


def test_attach_and_its_command_have_the_same_options_with_the_same_defaults() -> None:
    """Options and the folder and probes are given; the trainer is the script's."""
    parameters = {name: p.default for name, p in inspect.signature(rl_training.attach).parameters.items()}
    assert {option.name: option.default for option in options_of_attach()} == {
        name: default for name, default in parameters.items() if name not in ("trainer", "folder", "probes")
    }
    given = launcher._parser().parse_args(["--strict", "--whole-prompts", "false", "script.py", "--strict"])
    assert (given.strict, given.whole_prompts, given.metrics, given.alerts) == (True, False, "core", False)
    assert given.script == ["script.py", "--strict"]


# --- what is attached -----------------------------------------------------------------------------------------------

RUNS = {  # by kind of script: the folders that hold a run afterwards
    "a subclass": ["run"],
    "a loss of its own": ["run"],
    "two trainers": ["run", "run-2"],
    "it attaches already": ["own"],
}


@pytest.mark.parametrize("kind", RUNS)
def test_each_training_of_a_script_leaves_one_run(script: Path, kind: str) -> None:
    folder = script.parent
    arguments = ("--folder", str(folder / "run"), "--probes", "simple,ess", str(script), kind, str(folder))
    ended = forks.run(LAUNCHER, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.parent.name for path in folder.glob("*/logs")) == RUNS[kind]
    assert sorted(path.parent.parent.name for path in folder.glob("*/report/report.html")) == RUNS[kind]
    assert {row["probe"] for row in read_estimates(folder / RUNS[kind][-1] / "logs")} >= {"ess"}
    said = [line for line in ended.stderr.splitlines() if line.startswith("rl-training:")]
    assert said == [OWN_PROBES.format(name) for name in ("DrGRPOTrainer", "GRPOTrainer") if "attaches" in kind]


def test_trls_own_script_runs_as_a_module_and_leaves_a_run_named_like_it(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/train.jsonl").write_text('{"prompt": "1+2=?<think>"}\n' * 4)
    settings = {
        "model_name_or_path": TINY_PATH, "dataset_name": "prompts", "reward_funcs": "trainers.graded",
        "output_dir": "state", "use_cpu": "true", "bf16": "false", "max_steps": 1, "num_generations": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 8,
        "report_to": "none", "save_strategy": "no",
    }  # fmt: skip
    given = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    ended = forks.run(LAUNCHER, "-m", "trl.scripts.grpo", *given, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs/grpo/report/report.html").is_file()
    assert (tmp_path / "state/config.json").is_file()  # which the script saves after training


def test_in_the_order_of_trl_a_launched_training_is_bitwise_the_scripts_own(script: Path) -> None:
    folder = str(script.parent)
    options = ("--whole-prompts", "false", "--folder", f"{folder}/run", str(script))
    own, launched = forks.run(str(script), "a trainer", folder), forks.run(LAUNCHER, *options, "a trainer", folder)
    weights = [[line for line in run.stdout.splitlines() if line.startswith("weights")] for run in (own, launched)]
    assert weights[0] == weights[1]
    assert len(weights[0]) == 1
    assert (script.parent / "run/report/report.html").is_file()


def test_two_processes_of_a_script_leave_one_run(script: Path) -> None:
    folder = script.parent
    forks.run_on_ranks((LAUNCHER, "--folder", str(folder / "run"), str(script), "a trainer", str(folder)), 2)
    assert [path.parent.name for path in folder.glob("*/logs")] == ["run"]
    assert {row["world_size"] for row in read_estimates(folder / "run" / "logs")} == {2}
