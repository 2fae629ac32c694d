"""A step's data: what it may contain, and where it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from example_steps import drawn_adamw
from torch import Tensor
from two_turns import FOLDS, LOGITS, G, step_on

from rl_training.parallel.fold_vectors import FoldVectors
from rl_training.parallel.vectors import Layout

PACKAGE = Path(__file__).parents[2] / "rl_training"


def values_in(value: Any) -> Iterator[Any]:
    """Yield everything inside a value, through frozen dataclasses (but layouts), mappings and sequences."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Layout):
        assert value.__dataclass_params__.frozen, type(value)  # type: ignore[union-attr]
        for field in dataclasses.fields(value):
            yield from values_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from values_in(list(value.values()))
    elif isinstance(value, list | tuple | frozenset):
        for part in value:
            yield from values_in(part)
    else:
        yield value


def test_step_data_is_frozen_and_holds_only_plain_data() -> None:
    """Layouts, and vectors by fold, are allowed too: they say how vectors are stored."""
    logits = torch.nn.Parameter(torch.tensor(LOGITS, dtype=torch.float64))
    ctx = step_on(logits, torch.arange(FOLDS * G) % 5, {"logits": drawn_adamw((3, 3), 0.1, 20)})
    held = list(values_in(ctx.step))
    assert sum(isinstance(value, Tensor) for value in held) > 10
    others = {type(value) for value in held if not isinstance(value, Tensor | str)}
    assert others <= {bool, int, float, range, type(None), Layout, FoldVectors}


def test_step_data_is_created_in_one_module() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name: text.count(" StepData(") for name, text in texts.items() if " StepData(" in text} == {
        "build_step.py": 1
    }
