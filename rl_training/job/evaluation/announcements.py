"""Where the numbers of an evaluation are shown: the run's dashboards, its report and the table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.job.configuration.stored import unmarked
from rl_training.job.objects.dashboards import MetricsLogger, loggers_of
from rl_training.records.evaluated import BUILT_IN_METRICS, TABLE_FILE, estimates_in, largest_pass_at, read_table
from rl_training.records.files.printable import printable
from rl_training.records.jsonl import has_steps
from rl_training.records.pages.writing import format_estimate
from rl_training.records.report import write_report
from rl_training.statistics.estimate import Estimate

# Column titles of the table in the terminal, by metric.
COLUMNS = {name: info.title for name, info in BUILT_IN_METRICS.items() if info.title}


class RunAnnouncements:
    """The dashboards and the report of the run that is evaluated. Both stay as they are if nothing is added.

    Args:
        run: The run folder, or None if the checkpoints belong to no run.
        config: Configuration of the run as it trained, with its dashboards, which show it.
        prefix: Of the metrics' names in dashboards.
    """

    def __init__(self, run: Path | None, config: Mapping[str, Any], prefix: str) -> None:
        self.run = run
        self._config = config
        self.prefix = prefix
        self._loggers: list[MetricsLogger] | None = None  # None until the first numbers

    def add(self, step: int, metrics: Mapping[str, Estimate]) -> None:
        """Send the numbers of one checkpoint to the dashboards, each with its standard error."""
        if self._loggers is None:
            self._loggers = [] if self.run is None else loggers_of(self.run, unmarked(self._config))
            for dashboard in self._loggers:
                dashboard.start(after_step=0)
        named = {f"{self.prefix}{name}": e for name, e in metrics.items()}
        numbers = {name: e.value for name, e in named.items()} | {f"{name}_se": e.stderr for name, e in named.items()}
        for dashboard in self._loggers:
            dashboard.log(step, {name: value for name, value in numbers.items() if value == value})

    def close(self) -> None:
        """Close the dashboards, and rewrite the run's report if numbers were added."""
        for dashboard in self._loggers or []:
            dashboard.finish(pictures=[])
        if self._loggers is not None and self.run is not None and has_steps(self.run):
            print(f"Report: {write_report(self.run)}")


def print_table(folder: Path, problems: Sequence[str]) -> None:
    """Print one line per checkpoint, with pass@k for the largest k, followed by what failed and why."""
    table = read_table(folder)
    largest_k = (largest_pass_at(table["metric"]) or "pass_at_1").removeprefix("pass_at_")
    titles = {
        name.replace("pass_at", f"pass_at_{largest_k}"): title.format(largest_k) for name, title in COLUMNS.items()
    }
    shown = table[table["metric"].isin([*titles]) & np.isfinite(table["value"].astype(float))]
    if len(shown):
        cells = shown.assign(title=shown["metric"].map(titles), cell=[*map(format_estimate, estimates_in(shown))])
        pivoted = cells.pivot(index="step", columns="title", values="cell").fillna("–").reset_index()
        prompts = shown["num_prompts"].max()
        name = printable(folder.name)
        print(f"{name}: mean ± half of the 95 % interval, or the interval itself, over {prompts:.0f} prompts")
        print(pivoted[["step", *(title for title in titles.values() if title in pivoted)]].to_string(index=False))
        print(f"All numbers: {folder / TABLE_FILE}")
    for problem in problems:
        print(problem)
