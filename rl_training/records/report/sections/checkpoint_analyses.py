"""Analyses of a run's checkpoints: charts, a table and a page, for RUN/offline/NAME and for the run's report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rl_training.records.analyses import RESULT_FILE, analysis_results, read_analyses, table_of_analyses
from rl_training.records.files.spreadsheet import as_csv
from rl_training.records.first_order import KEYS, first_order_verdict, reasons_for
from rl_training.records.folder import OFFLINE
from rl_training.records.pages.charts import BLUE, GREEN, GREY, ORANGE, TEXT, Chart, Section, Series
from rl_training.records.pages.drawing import diagonal, draw
from rl_training.records.pages.page import write_page
from rl_training.records.pages.writing import MILLI, MISSING, normal_milli
from rl_training.records.table.series import Run
from rl_training.records.table.trends import MIN_POINTS, constants, scaled
from rl_training.statistics.estimate import Z_95

SWEEP_TABLE_FILE = "sweep.csv"
ANALYSES_PAGE_FILE = "analyses.html"
RESULT_STYLES = {  # by key of a result: label, colour and marker
    "deltaH1": ("predicted", BLUE, "circle"),
    "deltaH_true": ("measured", TEXT, "diamond"),
    "paired_error": ("predicted − measured", ORANGE, "triangle"),
    "deltaH_odd": ("measured, odd", GREEN, "square"),
    "paired_error_odd": ("predicted − odd", GREEN, "triangle-down"),
    "deltaH_snis": ("measured (SNIS)", GREY, "diamond"),
}
IN_TABLE = list(RESULT_STYLES)[:5]
SPLITS = {"part": "cause", "kind": "kind", "layer": "layer"}
MAX_ROWS = 40  # parts of a split that are drawn; a deep model has more layers, see the table of results


def write_analyses_page(folder: Path, section: Section) -> Path:
    """Write the page of the analyses in RUN/offline/NAME, with a CSV table next to it, and return its path."""
    table = as_csv(analysis_results(folder))
    return write_page(folder / ANALYSES_PAGE_FILE, "analyses.html", {SWEEP_TABLE_FILE: table}, section=section)


def analyses_of(run: Run) -> list[Section]:
    """Return a section for each name in RUN/offline that has results."""
    folders = {path.parents[1] for path in (run.folder / OFFLINE).glob(f"*/*/{RESULT_FILE}")}
    return [describe_analyses(folder, run) for folder in sorted(folders)]


def describe_analyses(folder: Path, run: Run | None) -> Section:
    """Return the section on the analyses in a folder: charts of what was varied, and a table row per checkpoint.

    Args:
        run: The run whose predictions during training are drawn too.
    """
    analyses = read_analyses(folder)
    results = table_of_analyses(analyses)
    name = folder.name
    contents = sorted(analyses.values(), key=lambda analysis: analysis["step"])
    verdicts = [
        first_order_verdict(content["step"] + 1, content["results"], content.get("reasons") or {}).sentence
        for content in contents
    ]
    table_rows = results[results["kind"].isin(["whole", "update"])].sort_values(
        ["step", "kind"], ascending=[True, False]
    )
    charts = [
        replace(chart, name=f"offline_{name}_{chart.name}", title=f"Offline {name}: {chart.title}")
        for chart in _charts(contents, results, run)
    ]
    headings = ["step", "U", *(RESULT_STYLES[key][0] for key in IN_TABLE), "ESS / N", "H"]
    return Section(name, verdicts, [headings, *map(_cells, table_rows.to_dict("records"))], charts)


def _charts(contents: Sequence[Mapping[str, Any]], results: pd.DataFrame, run: Run | None) -> list[Chart]:
    """Return the charts of analyses: of the last one's numbers, and of what was varied.

    Args:
        contents: Of each result.json, by step.
        results: Their table.
        run: The run whose predictions during training are drawn too.
    """
    whole = results[results["kind"] == "whole"].sort_values("step")
    charts = [_numbers(contents[-1]), _agreement(results, contents)]
    if (results["kind"] == "size").any():
        charts.append(_relative_error(results))
    if (results["kind"] == "eta").sum() + 1 >= MIN_POINTS:
        charts.append(_step_size(results))
    if len(whole) > 1:
        charts.append(_evolution(whole, run))
    if contents[-1]["tables"].get("conditioning"):
        charts.append(_conditioning(contents[-1]))
    return charts


def _cells(row: Mapping[Any, Any]) -> list[str]:
    """Return an analysis's row of the table."""
    filtered = ", filtered" if row["update_filtered"] else ""
    return [
        str(row["step"] + 1),
        f"{row['update_prompts']:.0f} prompts, seed {row['update_seed']:.0f}{filtered}",
        *(normal_milli(row[key], row[f"{key}_se"]) for key in IN_TABLE),
        f"{row['ESS'] / row['evaluation_size']:.3f}".replace("nan", MISSING),
        f"{row['H_orig']:.4f}".replace("nan", MISSING),
    ]


def _numbers(content: Mapping[str, Any]) -> Chart:
    """Return the chart of a result.json: a row for each number per token, with its 95 % interval."""
    finite_results = {
        key: value for key, value in content["results"].items() if isinstance(value, float) and math.isfinite(value)
    }
    rows = [(key, RESULT_STYLES[key]) for key in IN_TABLE if key in finite_results]
    for split, words in SPLITS.items():
        keys = [key for key in finite_results if key.startswith(f"deltaH1/{split}/")]
        parts = [key for key in keys if not key.endswith(("_se", "_sequence"))]
        if 1 < len(parts) <= MAX_ROWS:
            rows += [(key, (f"{words}: {key.rpartition('/')[2]}", BLUE, "circle")) for key in parts]
    results = pd.DataFrame([finite_results])
    series = [Series.cloud(*look, estimated(results, key), [look[0]], MILLI) for key, look in rows]
    missing = ["neither prediction nor truth is a finite number"]
    names = [label for _, (label, *_) in rows]
    facts = {"step": content["step"], "results": content["results"]}
    return draw("step", series, [] if rows else missing, names=names, height=30 + 24 * len(rows), **facts)


def estimated(table: pd.DataFrame, key: str) -> pd.DataFrame:
    """Return the numbers of a column with their 95 % intervals, nan if the error is unknown."""
    value = table[key]
    half = Z_95 * table.get(f"{key}_se", math.nan)
    return pd.DataFrame({"value": value, "low": value - half, "high": value + half})


def _agreement(table: pd.DataFrame, contents: Sequence[Mapping[str, Any]]) -> Chart:
    measured = table[table["kind"] != "size"].dropna(subset=["deltaH1", "deltaH_true"])
    series = []
    for truth in ("deltaH_true", "deltaH_odd"):
        rows = measured.dropna(subset=[truth])
        series.append(Series.cloud(*RESULT_STYLES[truth], estimated(rows, truth), estimated(rows, "deltaH1"), MILLI))
    rows = measured[measured["kind"] != "eta"].dropna(subset=["covariance"])
    columns = {"measured change": "deltaH_true", "prediction": "deltaH1", "−Cov(log π, A)": "covariance"}
    same = constants({name: rows[key].to_numpy() for name, key in columns.items()}) if len(rows) >= MIN_POINTS else []
    if len(rows) >= MIN_POINTS and not same:
        series.append(_covariances(rows))
    series = [curve for curve in series if len(curve.x)]
    if not series:
        missing = [reason for content in contents for reason in reasons_for(content.get("reasons") or {}, KEYS[:2])]
        return draw("agreement", [], [*dict.fromkeys(missing)])
    missing = [f"covariance – the same at every step: {', '.join(same)}"] if same else []
    return draw("agreement", [diagonal(series, "y = x"), *series], missing)


def _covariances(rows: pd.DataFrame) -> Series:
    """Return −Cov(log π, A), scaled to the measured changes, with its correlation and that of the prediction."""
    x = rows["deltaH_true"].to_numpy()
    y = rows["covariance"].to_numpy()
    r = {key: np.corrcoef(x, rows[key])[0, 1] for key in ("deltaH1", "covariance")}
    label = f"−Cov(log π, A), scaled: r = {r['covariance']:.2f} (predicted: {r['deltaH1']:.2f})"
    return Series.cloud(label, ORANGE, "triangle", MILLI * x, MILLI * scaled(y, x))


def _relative_error(table: pd.DataFrame) -> Chart:
    sizes = table[table["kind"] == "size"]
    whole = table[table["kind"] == "whole"].set_index("step")
    truth = sizes["step"].map(whole["deltaH_odd"].fillna(whole["deltaH_true"]).abs())
    series = []
    for key, (label, color, mark) in RESULT_STYLES.items():
        error = (Z_95 * sizes[f"{key}_se"] / truth).groupby(sizes["evaluation_size"]).mean().dropna()
        series.append(Series(label, color, error.index, error, mark=mark))
    return draw("sizes", series)


def log_slope(etas: np.ndarray, changes: np.ndarray) -> tuple[float, float]:
    """Return slope and R² of log|ΔH| against log η. The slope is 1 if the change is first order.

    >>> slope, fit = log_slope(np.array([0.25, 0.5, 1.0]), np.array([-0.5, -1.0, -2.0]))
    >>> round(slope, 6), round(fit, 6)
    (1.0, 1.0)
    """
    x = np.log(etas)
    y = np.log(np.abs(changes))
    return float(np.polyfit(x, y, 1)[0]), float(np.corrcoef(x, y)[0, 1] ** 2)


def _step_size(table: pd.DataFrame) -> Chart:
    variations = table[table["kind"].isin(["whole", "eta"])].sort_values("eta")
    series = []
    for step in sorted(variations["step"].unique()):
        of_step = variations[variations["step"] == step]
        first = step == variations["step"].min()
        for key in ("deltaH1", "deltaH_true", "deltaH_snis", "deltaH_odd"):
            label, color, mark = RESULT_STYLES[key]
            rows = of_step.dropna(subset=[key])
            etas = rows["eta"].to_numpy()
            changes = rows[key].to_numpy()
            if first and len(rows) >= MIN_POINTS and key != "deltaH1":
                label = "{}: slope {:.3f}, R² {:.6f}".format(label, *log_slope(etas, changes))
            elif not first:
                label = f"{label}, step {step + 1}"
            series.append(Series(label, color, etas, MILLI * np.abs(changes), mark=mark, opacity=1.0 if first else 0.3))
    return draw("eta", series)


def _evolution(whole: pd.DataFrame, run: Run | None) -> Chart:
    series = []
    if run is not None and len(run.finite_rows("delta_h/forward")):
        series.append(Series.of_rows("in training: forward", GREY, run.rows("delta_h/forward"), "circle"))
    for key, offset in (("deltaH1", -0.15), ("deltaH_true", 0.15)):
        label, color, mark = RESULT_STYLES[key]
        steps = whole["step"] + 1 + offset
        series.append(Series.cloud(f"{label} offline", color, mark, steps, estimated(whole, key)))
    return draw("checkpoints", series)


def _conditioning(content: Mapping[str, Any]) -> Chart:
    """Return the chart of δH₁ under other preconditioners."""
    table = pd.DataFrame(content["tables"]["conditioning"])
    kinds = {"same ‖δθ‖": ("delta_h1", BLUE, "circle"), "same gain in reward": ("delta_h1_same_gain", ORANGE, "square")}
    series = [
        Series.cloud(label, color, mark, MILLI * table[column], table["name"])
        for label, (column, color, mark) in kinds.items()
    ]
    facts = {"names": table["name"].tolist(), "height": 40 + 30 * len(table), "step": content["step"]}
    return draw("conditioning", series, **facts)
