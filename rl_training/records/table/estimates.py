"""Rows of a run's table as estimates, and estimates as such rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable


def finite(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose value is finite."""
    return rows[np.isfinite(rows["value"])]


def to_estimates(rows: pd.DataFrame) -> dict[int, Estimate]:
    """Return the estimates of these rows by step."""
    columns = ["value", "stderr", "num_samples", "reason", "code", "is_interval", "low", "high"]
    return {
        int(step): Estimate(
            value, stderr, int(num), Unavailable.recorded(code, reason) if code else reason,
            interval=(low, high) if is_interval else None,
        )
        for step, value, stderr, num, reason, code, is_interval, low, high in zip(
            rows.index, *(rows[column].tolist() for column in columns), strict=True
        )
    }  # fmt: skip


def to_rows(estimates: Mapping[Any, Estimate]) -> pd.DataFrame:
    """Return a row for each estimate, in the format of `Run.rows`."""
    rows = [
        (e.value, e.stderr, e.num_samples, *e.bounds(), e.interval is not None, e.reason, e.code)
        for e in estimates.values()
    ]
    kinds = {
        **dict.fromkeys(["value", "stderr", "num_samples", "low", "high"], float),
        "is_interval": bool,
        "reason": str,
        "code": str,
    }
    return pd.DataFrame(rows, pd.Index(estimates, name="step"), list(kinds)).astype(kinds)


def by_about_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Return these rows by the step that they are about, where that is recorded; backward is about the step before.

    Of several rows about one step, the last counts.
    """
    rows = rows.set_index(rows["about_step"].fillna(rows.index.to_series()).astype(int))
    return rows[~rows.index.duplicated(keep="last")]


def last_of(rows: pd.DataFrame) -> Estimate | None:
    """Return the last of these rows as an estimate; None if there are no rows."""
    return next(iter(to_estimates(rows.tail(1)).values()), None)


def mean_of_rows(rows: pd.DataFrame) -> Estimate | None:
    """Return the mean of these rows of a metric, whose errors are independent; None if there are none."""
    if rows.empty:
        return None
    stderr = math.sqrt((rows["stderr"] ** 2).sum(skipna=False)) / len(rows)
    return Estimate(rows["value"].mean(), stderr, int(rows["num_samples"].min()))
