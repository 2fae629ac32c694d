"""What the terminal shows of evaluations: two bars while they run, a table at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from rl_training.records.evaluated import TABLE_FILE, EvaluatedMetric

WIDTH = 100  # minimum of the table: truncated numbers would be useless


class Progress:
    """A bar over checkpoints, and below it one over the responses to their rows."""

    def __init__(self, num_checkpoints: int, num_finished: int, responses_each: int) -> None:
        left = num_checkpoints - num_finished
        every = 0.2 if sys.stderr.isatty() else 10.0  # seconds between two drawings
        self.checkpoints = tqdm(total=num_checkpoints, initial=num_finished, unit="checkpoint", position=0)
        self._responses = tqdm(
            total=left * responses_each, unit="response", position=1, leave=False, mininterval=every, maxinterval=every
        )

    def add(self, num_responses: int) -> None:
        self._responses.update(num_responses)

    def close(self) -> None:
        self._responses.close()
        self.checkpoints.close()


def print_table(folder: Path, rows: Sequence[EvaluatedMetric], problems: Sequence[str]) -> None:
    """Prints a line per checkpoint, the best reward in bold, and below it what failed and why."""
    largest_k = max((int(r.metric.rsplit("_", 1)[1]) for r in rows if r.metric.startswith("pass_at_")), default=1)
    columns = {
        "reward": "reward", "greedy_accuracy": "greedy", f"pass_at_{largest_k}": f"pass@{largest_k}",
        "majority": "majority", "entropy/token": "entropy/token", "kl/token": "KL/token", "length": "length",
    }  # fmt: skip
    by_step: dict[int, dict[str, EvaluatedMetric]] = {}
    for row in rows:
        by_step.setdefault(row.step, {})[row.metric] = row
    shown = [name for name in columns if any(math.isfinite(step[name].value) for step in by_step.values())]
    best = max(by_step, key=lambda step: by_step[step]["reward"].value, default=None)
    prompts = max((row.num_prompts for row in rows if row.metric == "reward"), default=0)
    title = Text(f"{folder.name}: mean ± standard error over {prompts} prompts", style="bold")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("step", justify="right")
    for name in shown:
        table.add_column(columns[name], justify="right", no_wrap=True)
    for step, metrics in by_step.items():
        cells = [_cell(metrics[name]) for name in shown]
        table.add_row(str(step), *cells, style="bold" if step == best and len(by_step) > 1 else "")
    console = Console(highlight=False)
    if any(row.stderr == 0 and not math.isnan(row.low) for row in rows if row.metric in shown):
        table.caption = Text("- or + alone: all prompts gave the same value; the 95 % interval extends that far")
        table.caption_justify = "left"
    if by_step:
        Console(highlight=False, width=max(console.width, WIDTH)).print(table)
        console.print(Text(f"All numbers: {folder / TABLE_FILE}"), soft_wrap=True)
    for problem in problems:
        console.print(Text(problem), soft_wrap=True)


def _cell(row: EvaluatedMetric) -> str:
    if math.isnan(row.value):
        return "–"
    decimals = 1 if abs(row.value) >= 10 else 3
    if row.stderr > 0:
        return f"{row.value:.{decimals}f}±{row.stderr:.{decimals}f}"
    # A standard error of 0 is no estimate: all prompts gave the same value.
    reaches = (("-", row.value - row.low), ("+", row.high - row.value))
    return f"{row.value:.{decimals}f}" + "".join(f"{sign}{reach:.{decimals}f}" for sign, reach in reaches if reach > 0)
