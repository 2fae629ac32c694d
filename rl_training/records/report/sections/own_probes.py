"""What probes of one's own measured: the page has no chart for them, so their metrics are a table."""

from __future__ import annotations

import math

import pandas as pd

from rl_training.records.jsonl import PROBES_FILE
from rl_training.records.pages.writing import MISSING, format_estimate, on_one_line
from rl_training.records.table.estimates import last_of
from rl_training.records.table.series import Run
from rl_training.vocabulary import BUILT_IN_NAMES, ENGINE, KL_BOUND

SHOWN = {*BUILT_IN_NAMES, ENGINE, KL_BOUND}  # the page shows elsewhere what these measure


def is_own(table: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows of a run's table are estimates of probes of one's own."""
    return (table["file"] == PROBES_FILE) & table["probe"].notna() & ~table["probe"].isin(SHOWN)


def own_probes(table: pd.DataFrame) -> list[str]:
    """Return the names of the probes of one's own, in the order in which they first measured."""
    return [*dict.fromkeys(map(str, table.loc[is_own(table), "probe"]))]


def own_metrics(run: Run) -> list[list[str]]:
    """Return the table of metrics of probes of one's own: metric, last value, its step, note; [] if there are none.

    A value without an error bar is a value: the note says that it has none, and why if that is recorded.
    """
    rows = []
    for name in run.table[is_own(run.table)]["name"].unique():
        by_step = run.rows(name)
        values = by_step[by_step["value"].notna()]
        latest = last_of(values if len(values) else by_step)
        if latest is None:
            continue
        note = latest.reason
        if not math.isnan(latest.value) and not latest.half_width() > 0:
            note = note or "without an error bar"
        at = str(values.index.max()) if len(values) else MISSING
        rows.append([name, format_estimate(latest), at, on_one_line(note)])
    return [["metric", "last value", "step", "note"], *rows] if rows else []
