"""Why a quantity of a run is missing, ends early or has no error bars, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from rl_training.records.jsonl import PROBES_FILE
from rl_training.records.table.estimates import finite

NO_REASON = "no reason was recorded"
NO_PROBE = f"no probe measured it ({PROBES_FILE} has no such line)"


def ending_reason(rows: pd.DataFrame) -> str:
    """Return why a quantity is missing and from which step on, or "" if its last value is there."""
    if rows.empty:
        return NO_PROBE
    last = rows.iloc[-1]
    finite_steps = finite(rows).index
    if math.isfinite(last["value"]):
        return ""
    reason = last["reason"] or "not a finite number"
    return (
        f"from step {rows.index[rows.index > finite_steps.max()].min()} on: {reason}" if len(finite_steps) else reason
    )


def missing_notes(quantities: Mapping[str, pd.DataFrame], values: bool = True, bands: bool = True) -> list[str]:
    """Return a line for each reason why quantities are missing from a chart, end before it, or have no error bars."""
    ends: dict[str, list[str]] = {}
    for label, rows in quantities.items():
        ends.setdefault(ending_reason(rows), []).append(label)
    lines = [f"{', '.join(labels)} – {reason}" for reason, labels in ends.items() if reason and values]
    if not bands or not any(_lacks_bars(rows) for rows in quantities.values()):
        return lines
    finite_rows = pd.concat([finite(rows).assign(label=label) for label, rows in quantities.items()])
    has_bar = finite_rows[finite_rows["stderr"].notna()]
    first_bars = {label: rows.index.min() for label, rows in has_bar.groupby("label")}
    # The steps before the first error bar, of which there are none without any.
    is_warm_up = finite_rows.index < finite_rows["label"].map(first_bars).astype(float)
    without = finite_rows[finite_rows["stderr"].isna() & (finite_rows["reason"] != "") & ~is_warm_up]
    for reason, rows in without.groupby("reason", sort=False):
        span = f"steps {rows.index.min()}–{rows.index.max()}"
        lines.append(f"error bars of {', '.join(rows['label'].unique())}, {span} – {reason}")
    return lines


def _lacks_bars(rows: pd.DataFrame) -> bool:
    """Return whether some finite value has no error bar for a reason."""
    return bool((np.isfinite(rows["value"]) & rows["stderr"].isna() & (rows["reason"] != "")).any())
