"""The examples and the README's lines run exactly as they are shown."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from trainers import FEW
from trl import GRPOConfig, GRPOTrainer

import rl_training
from rl_training.models.load import TINY_PATH
from rl_training.probes import BUILT_IN
from rl_training.records.jsonl import read_estimates, read_metrics

ROOT = Path(__file__).parents[2]
PROBES = {probe.__name__ for probe in BUILT_IN.values()}


def imports_of_the_package(code: str) -> list[str]:
    """Return the package's modules from which a program imports names, one entry per import line."""
    lines = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    return [line.module for line in lines if line.module and line.module.startswith("rl_training")]


def test_two_lines_added_to_a_trl_script_give_it_a_report(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = "\n".join(json.dumps({"prompt": f"{number}+1="}) for number in range(8))
    (tmp_path / "data" / "train.jsonl").write_text(rows, encoding="utf-8")
    settings = {
        "model_name_or_path": TINY_PATH, "dataset_name": tmp_path / "data", "output_dir": tmp_path / "run",
        "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
        "num_generations": 4, "max_completion_length": 8, "report_to": "none", "use_cpu": True, "bf16": False,
        "save_strategy": "no",
    }  # fmt: skip
    typed = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    ended = forks.run("examples/trl_script.py", *typed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "logs") if "delta_h/forward" in row] == [1, 2]
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    script = ROOT.joinpath("examples", "trl_script.py").read_text(encoding="utf-8")
    assert sum(line.endswith("# probes") for line in script.splitlines()) == 2


def test_every_example_is_run_by_a_test_and_is_short() -> None:
    """Elsewhere: verl's command is composed, the notebook and the whole loop, which are longer, run."""
    elsewhere = {"verl_gsm8k.sh", "two_lines.ipynb", "plain_loop.py"}
    here = Path(__file__).read_text(encoding="utf-8")
    for path in sorted(path for path in (ROOT / "examples").iterdir() if path.is_file()):
        assert path.name in elsewhere or f"examples/{path.name}" in here, path
        lines = path.read_text(encoding="utf-8").splitlines()
        assert path.name in ("two_lines.ipynb", "plain_loop.py") or 10 <= len(lines) <= 60, path


def estimated(folder: Path, name: str) -> list[float]:
    """Return the values that a run recorded under a name, without nan."""
    return [row["value"] for row in read_estimates(folder / "logs") if row["name"] == name and row["value"] is not None]


@pytest.mark.parametrize(
    ("command", "run", "measured", "shown"),
    [
        (["examples/two_rewards.py"], "two_rewards", "measured/delta_reward/digits", "digits"),
        (["examples/lora.py"], "lora", "delta_h/forward", "predicted ΔH"),
        (["examples/own_probe.py"], "own_probe", "length/mean", "length/mean"),
        (["rl_training/attach.py", "--folder", "runs/unchanged", str(ROOT / "examples/unchanged.py")],
         "unchanged", "delta_h/forward", "predicted ΔH"),
    ],
    ids=lambda value: value if isinstance(value, str) else Path(value[-1]).stem,
)  # fmt: skip
def test_an_example_leaves_the_numbers_and_the_report_that_it_promises(
    tmp_path: Path, command: list[str], run: str, measured: str, shown: str
) -> None:
    ended = forks.run(*command, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert estimated(tmp_path / "runs" / run, measured)
    assert shown in (tmp_path / "runs" / run / "report" / "report.html").read_text(encoding="utf-8")
    if run == "own_probe":
        assert (tmp_path / "runs" / run / "length.png").stat().st_size > 1000
        lengths = [row for row in read_estimates(tmp_path / "runs" / run / "logs") if row["name"] == "length/mean"]
        logged = [row["completions/mean_length"] for row in read_metrics(tmp_path / "runs" / run / "logs")]
        assert [row["value"] for row in lengths] == pytest.approx(logged, rel=1e-3)
        assert all(row["stderr"] > 0.0 for row in lengths)


def test_the_example_of_two_processes_has_one_run_with_the_prompts_of_both(tmp_path: Path) -> None:
    forks.run_on_ranks(["examples/two_processes.py"], 2, tmp_path, ACCELERATE_USE_CPU="true")
    rows = [row for row in read_estimates(tmp_path / "runs/two_processes/logs") if row["name"] == "delta_h/forward"]
    assert [(row["step"], row["world_size"]) for row in rows] == [(1, 2), (2, 2)]
    assert all(row["stderr"] > 0.0 for row in rows)


def test_the_examples_of_a_sweep_and_of_tables_show_what_its_runs_recorded(tmp_path: Path) -> None:
    ended = forks.run("examples/sweep.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    compared = forks.run("rl_training/__main__.py", "report", "runs/sweep", "--out", "sweep.html", folder=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "learning_rate" in (tmp_path / "sweep.html").read_text(encoding="utf-8")
    tables = forks.run("examples/tables.py", "runs/sweep/0.001", folder=tmp_path)
    assert tables.returncode == 0, tables.stderr
    first = estimated(tmp_path / "runs" / "sweep" / "0.001", "delta_h/forward")[0]
    assert f"{first:.4f}" in tables.stdout
    assert "delta_h/backward" in tables.stdout  # the first step has none


def test_the_readmes_lines_around_a_trainer_write_a_report(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    [lines] = [block for block in blocks if "trainer.train()" in block]
    assert imports_of_the_package(lines) == ["rl_training"]
    monkeypatch.chdir(tmp_path)
    exec(lines, {"trainer": make_trainer(GRPOTrainer, config_class=GRPOConfig, bf16=False, use_cpu=True, **FEW)})
    assert (tmp_path / "runs" / "my_run" / "report" / "report.html").is_file()


@pytest.mark.parametrize("name", [*rl_training._HOME, *sorted(PROBES)])
def test_a_public_name_is_the_name_in_its_module(name: str) -> None:
    assert getattr(rl_training, name).__name__ == name


def test_a_star_import_brings_exactly_the_public_names() -> None:
    brought: dict[str, Any] = {}
    exec("from rl_training import *", brought)
    assert brought.keys() - {"__builtins__"} == {*rl_training._HOME} | PROBES


def test_every_probe_class_is_listed_as_built_in() -> None:
    assert {name for name in vars(rl_training.probes) if name.endswith("Probe")} - {"Probe"} == PROBES


def test_an_unknown_name_cannot_be_imported() -> None:
    for name in ("analyse", "SimpelProbe"):
        with pytest.raises(ImportError, match=f"'{name}' from 'rl_training'"):
            exec(f"from rl_training import {name}")
