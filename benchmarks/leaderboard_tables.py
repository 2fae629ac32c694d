"""What the leaderboard's two tables share: the runs that are there, one module a method, and Markdown."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rl_training import Estimate

Rows = list[dict[str, Any]]  # a row a method; a triple is a value with the ends of its 95 % interval


def files_of(package: ModuleType) -> dict[str, ModuleType]:
    """Returns the modules of a package by name: one for each file."""
    names = sorted(path.stem for path in Path(package.__path__[0]).glob("[!_]*.py"))
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


def load(folder: Path) -> list[dict[str, Any]]:
    """Returns the runs that are there."""
    return [torch.load(path, weights_only=False) for path in sorted((folder / "runs").glob("*.pt"))]


def column(estimates: Sequence[Estimate]) -> tuple[Tensor, Tensor]:
    """Returns values and half widths of 95 % intervals, (n,) each."""
    pairs = [(estimate.value, estimate.half_width()) for estimate in estimates]
    values, widths = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    return values, widths


def entropies(run: Mapping[str, Any]) -> Tensor:
    """Returns the entropy of each step's batch, (steps,) nats per token."""
    return column([step["facts"].products["entropy"] for step in run["steps"]])[0]


def markdown(rows: Rows) -> str:
    """Returns the rows as a table."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    middle, low, high = (f"{x:.2f}" if abs(x) < 100 or math.isnan(x) else f"{x:.0f}" for x in value)
    return "–" if middle == "nan" else f"{middle} ({low} to {high})"
