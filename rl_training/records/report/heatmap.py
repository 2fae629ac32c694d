"""A chart of cells: a row for each of a table's, a place on x for each column, the value as colour."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import numpy as np
import pandas as pd

from rl_training.records.report.charts import GREY, HEIGHT, ORANGE, Axis, Chart, Series, to_spec

MAX_LABELS = 40  # of rows: more would overlap


def heatmap(
    name: str,
    title: str,
    caption: str,
    missing: Sequence[str],
    table: pd.DataFrame,
    x: Axis,
    row_title: str,
    unit: str,
    largest: float,
    height: int = HEIGHT,
) -> Chart:
    """Returns a chart of cells: a row for each of the table's, a place on x for each column; ± largest saturate."""
    labels = [str(label) for label in table.index]
    cells = [
        Series(label, GREY, list(table.columns), [label] * len(row), low=row, line=False)
        for label, row in zip(labels, table.to_numpy().tolist(), strict=True)
    ]
    color = alt.Scale(domain=[-largest, 0, largest], range=[ORANGE, "#f7f7f7", "#6a3d9a"], clamp=True)
    half = 0.5 * float(np.diff(table.columns).min()) if len(table.columns) > 1 else 0.5
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .transform_calculate(left=f"datum.x - {half}", right=f"datum.x + {half}")
        .mark_rect(clip=True)
        .encode(
            x=x.encoding(alt.X, "left"),
            x2=alt.X2("right:Q"),
            y=Axis(row_title, "names", names=labels).encoding(alt.Y, "y", labels=len(labels) <= MAX_LABELS),
            color=alt.Color(
                "low:Q", scale=color, legend=alt.Legend(title=unit, orient="right", titleOrient="right", titleLimit=0)
            ),
            tooltip=[
                alt.Tooltip("x:Q", title=x.title),
                alt.Tooltip("y:N", title=row_title),
                alt.Tooltip("low:Q", title=unit),
            ],
        )
    )
    spec = {**to_spec(chart, height), "config": {"legend": {"disable": False}}}
    return Chart(name, title, caption, list(missing), cells, spec, is_named=True)
