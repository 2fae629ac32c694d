"""The table that an evaluation ends with in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from rl_training.records.evaluated import TABLE_FILE, EvaluatedMetric

COLUMNS = {
    "reward": "reward", "greedy_accuracy": "greedy", "pass_at": "pass@{}", "majority": "majority",
    "entropy/token": "entropy/token", "kl/token": "KL/token", "length": "length",
}  # fmt: skip


def print_table(folder: Path, rows: Sequence[EvaluatedMetric], problems: Sequence[str]) -> None:
    """Prints a line per checkpoint, pass@k of the largest k, and below it what failed and why."""
    most = max((int(row.metric.rsplit("_", 1)[1]) for row in rows if row.metric.startswith("pass_at_")), default=1)
    titles = {name.replace("pass_at", f"pass_at_{most}"): title.format(most) for name, title in COLUMNS.items()}
    shown = [row for row in rows if row.metric in titles and math.isfinite(row.value)]
    if shown:
        prompts = max(row.num_prompts for row in shown)
        cells = pd.DataFrame({"step": row.step, "title": titles[row.metric], "cell": _cell(row)} for row in shown)
        table = cells.pivot(index="step", columns="title", values="cell").fillna("–").reset_index()
        print(f"{folder.name}: mean ± standard error over {prompts} prompts")
        print(table[["step", *(title for title in titles.values() if title in table)]].to_string(index=False))
        if any(row.stderr == 0 and not math.isnan(row.low) for row in shown):
            print("- or + alone: all prompts gave the same value; the 95 % interval extends that far")
        print(f"All numbers: {folder / TABLE_FILE}")
    for problem in problems:
        print(problem)


def _cell(row: EvaluatedMetric) -> str:
    decimals = 1 if abs(row.value) >= 10 else 3
    if row.stderr > 0:
        return f"{row.value:.{decimals}f}±{row.stderr:.{decimals}f}"
    # A standard error of 0 is no estimate: all prompts gave the same value.
    reaches = (("-", row.value - row.low), ("+", row.high - row.value))
    return f"{row.value:.{decimals}f}" + "".join(f"{sign}{reach:.{decimals}f}" for sign, reach in reaches if reach > 0)
