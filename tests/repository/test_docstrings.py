"""Examples in docstrings give the results that they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "rl_training").glob("**/*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_give_the_stated_results(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed


def test_formula_modules_have_docstring_examples() -> None:
    formulas = ("rl_training.statistics.", "rl_training.step.", "rl_training.optim.", "rl_training.entropy.")
    assert sum(module.startswith(formulas) for module in MODULES) >= 8
