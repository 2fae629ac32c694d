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
from rl_training.probes import BUILT_IN
from rl_training.records.jsonl import read_metrics
from rl_training.tasks.tiny import TINY_PATH

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
        with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'rl_training'"):
            exec(f"from rl_training import {name}")
