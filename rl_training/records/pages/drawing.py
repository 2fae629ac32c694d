"""Makes charts: from series of points and an entry of templates/charts.yaml, with axes that suit both."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rl_training.records.pages.charts import GREY, HEIGHT, Chart, Series, first_by_label, load_chart

# Without the expression Vega labels halves.
WHOLE_NUMBERS = {"tickMinStep": 1, "format": "d", "labelExpr": "datum.value % 1 ? '' : datum.label"}
STEPS = {"title": "optimizer step", "scale": {"nice": False}, "axis": WHOLE_NUMBERS}
TITLE_LENGTH = 44  # characters per line of an axis title
MARGIN = 0.02  # room on an axis beyond 0 and 1, for the width of the line
MAX_LABELS = 40  # labels of rows of cells; more would overlap


def draw(
    key: str,
    series: Sequence[Series],
    missing: Sequence[str] = (),
    ends: tuple[float, float] | None = None,
    names: Sequence[str] = (),
    rules: Mapping[str, Sequence[float]] | None = None,
    cells: Mapping[str, Any] | None = None,
    start: float | None = None,
    height: int = HEIGHT,
    **words: Any,
) -> Chart:
    """Return the chart that charts.yaml calls `key`. If no series has a point, it only says what is missing.

    Args:
        missing: What the chart lacks, and why.
        ends: Ends of the y-axis.
        names: Labels along the y-axis, instead of numbers.
        rules: Straight lines across the chart, in addition to those in charts.yaml: positions by axis, "x" or "y".
        cells: For a matrix of cells: half of a cell's width, the largest value, and the ends of the x-axis.
        start: Offset of a second y-axis, which is labelled y + start.
        words: Values for the templates of its texts.
    """
    chart = load_chart(key, words)
    series = [curve for curve in series if len(curve.x)]
    name = chart.get("name", key)
    if not series:
        return Chart(name, chart["title"], "", list(missing))
    labels = first_by_label(series)
    over_steps = "x" not in chart and not cells
    facts = {
        "x": {"field": "x", **axis(chart.get("x", STEPS), cells["ends"] if cells else None)},
        "y": {"field": "y", **axis(chart.get("y", {}), ends, names, has_labels=not cells or len(names) <= MAX_LABELS)},
        "labels": [*labels],
        "colors": [curve.color for curve in labels.values()],
        "dashes": [[*curve.dash] or [1, 0] for curve in labels.values()],
        "rules": {**chart.get("rules", {}), **(rules or {})},
        "zoomed": ["x"] if over_steps or names else ["x", "y"],
        "height": chart.get("height", height),
        "unit": chart.get("unit"),
        "is_cut": ends is not None and any(not ends[0] <= y <= ends[1] for curve in series for y in curve.heights),
        "cells": cells,
        "start": start,
        "over_steps": over_steps,
        "is_named": set(names) == {*labels},  # the labels of the y-axis are the series' names
    }
    left_out = dict.fromkeys(curve.left_out for curve in series if curve.left_out)
    return Chart(name, chart["title"], chart.get("caption", ""), [*missing, *left_out], series, facts)


def axis(
    entry: Mapping[str, Any],
    ends: tuple[float, float] | None = None,
    names: Sequence[str] = (),
    has_labels: bool = True,
) -> dict[str, Any]:
    """Return the Vega-Lite channel of an axis with numbers, or with these names.

    Args:
        entry: Of the axis, in charts.yaml.
        ends: Of the axis; None to fit the data.
        names: Its labels, instead of numbers.
        has_labels: Whether labels and ticks are drawn.
    """
    title = textwrap.wrap(entry.get("title", ""), TITLE_LENGTH) or None
    look = {"titleLimit": 0, "labelLimit": 260 if names else 0, **entry.get("axis", {})}
    if not has_labels:
        look |= {"labels": False, "ticks": False}
    facts: dict[str, Any] = {"title": title, "axis": look}
    if names:
        return {**facts, "type": "nominal", "sort": None, "scale": {"domain": list(names)}}
    scale = {"nice": ends is None, **entry.get("scale", {}), **({"domain": list(ends)} if ends else {})}
    if "type" not in scale:
        scale |= {"zero": False} | ({} if ends else {"padding": 8})
    return {**facts, "type": "quantitative", "scale": scale}


def heatmap(key: str, table: pd.DataFrame, largest: float, missing: Sequence[str] = (), **words: Any) -> Chart:
    """Return a chart of cells: one row per row of the table, its columns along x. Colours saturate at ±`largest`."""
    labels = [str(label) for label in table.index]
    rows = [
        Series(label, GREY, list(table.columns), [label] * table.shape[1], low=row, line=False)
        for label, row in zip(labels, table.to_numpy().tolist(), strict=True)
    ]
    places = table.columns.to_numpy(dtype=float)
    half = 0.5 * float(np.diff(places).min()) if len(places) > 1 else 0.5
    ends = (float(places.min(initial=np.inf)) - half, float(places.max(initial=-np.inf)) + half)
    cells = {"half": half, "largest": largest, "ends": ends}
    return draw(key, rows, missing, names=labels, cells=cells, **words)


def diagonal(clouds: Sequence[Series], label: str = "prediction = truth") -> Series:
    """Return the line y = x across the range of these clouds."""
    values = [value for cloud in clouds for value in (*cloud.x, *cloud.y)]
    ends = [min(values), max(values)]
    return Series(label, GREY, ends, ends, dash=(5, 3))


def axis_limits(rows: pd.DataFrame, is_share: bool = False, floor: float = 0.0) -> tuple[float, float]:
    """Return the ends of an axis for these rows of metrics: all values, and intervals of typical width.

    A few wide intervals would flatten all curves. Changes that are small compared with their errors keep looking small.

    Args:
        is_share: The axis stays within 0 and 1, unless a value lies outside.
        floor: Least margin as a share of the values' median size, so that small changes look small.
    """
    values = rows["value"]
    span = float(np.ptp(values))
    errors = rows["stderr"]
    most = max(span, 2 * errors.median()) if errors.notna().any() else span
    rooms = []
    for reach in (values - rows["low"], rows["high"] - values):
        typical = reach[np.isfinite(reach)].median() if np.isfinite(reach).any() else 0.0
        room = max(min(typical, most or typical), 0.1 * span, floor * values.abs().median())
        rooms.append(room or abs(values.iloc[0]) or 1.0)
    low = values.min() - rooms[0]
    high = values.max() + rooms[1]
    if is_share:
        return max(low, min(0.0, values.min()) - MARGIN), min(high, max(1.0, values.max()) + MARGIN)
    return low, high
