"""Analyses of a run's checkpoints: their charts, one table, one page, for RUN/offline/NAME and the run's report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rl_training.records.analyses import OFFLINE, RESULT_FILE, Z_95, analysis_results, read_analysis, verdict
from rl_training.records.atomic_write import write_atomically
from rl_training.records.report.charts import BLUE, GREEN, GREY, ORANGE, STEP, TEXT, Axis, Chart, Series, draw
from rl_training.records.report.curves import line
from rl_training.records.report.page import render
from rl_training.records.report.predictions import MIN_POINTS, diagonal, scaled
from rl_training.records.report.series import Run, curve
from rl_training.records.report.vega import pictures
from rl_training.records.report.words import MILLI, MISSING, plus_minus

TABLE_FILE, PAGE_FILE = "sweep.csv", "analyses.html"
STYLES = {  # of a result: its name, colour and marker
    "deltaH1": ("predicted", BLUE, "circle"),
    "deltaH_true": ("measured", TEXT, "diamond"),
    "paired_error": ("predicted − measured", ORANGE, "triangle"),
    "deltaH_odd": ("measured, odd", GREEN, "square"),
    "paired_error_odd": ("predicted − odd", GREEN, "triangle-down"),
    "deltaH_snis": ("measured (SNIS)", GREY, "diamond"),
}
IN_TABLE = list(STYLES)[:5]
SPLITS = {"part": "cause", "kind": "kind", "layer": "layer"}
MOST_ROWS = 40  # of a split; a deep model's layers are in the table of results


@dataclass(frozen=True)
class AnalysesSection:
    """What a page shows of the analyses of one name."""

    name: str
    verdicts: list[str]  # sentences on steps where the first order fails
    charts: list[Chart]
    headings: list[str]
    rows: list[list[str]]  # of cells, in thousandths of a nat per token


def write_analyses_page(folder: Path, section: AnalysesSection) -> Path:
    """Returns the page that it wrote of the analyses in RUN/offline/NAME; charts and a CSV table lie beside it."""
    page = folder / PAGE_FILE
    files = {folder / TABLE_FILE: analysis_results(folder).to_csv(index=False).encode()}
    files |= {folder / name: png for name, png in pictures(section.charts).items()}
    write_atomically({**files, page: render("analyses.html", section=section).encode()})
    return page


def analyses_of(run: Run, known: Mapping[Path, AnalysesSection]) -> list[AnalysesSection]:
    """Returns a section for each name in RUN/offline that has results; `known`, by folder, need no drawing again."""
    names = {path.parents[1] for path in (run.folder / OFFLINE).glob(f"*/*/{RESULT_FILE}")}
    return [known.get(folder) or describe_analyses(folder, run) for folder in sorted(names)]


def describe_analyses(folder: Path, run: Run | None) -> AnalysesSection:
    """Returns what is to be shown of the analyses in a folder: charts of what was varied, and a row per checkpoint.

    run  whose in-loop predictions are drawn beside them
    """
    table, name = analysis_results(folder), folder.name
    contents = [read_analysis(path) for path in folder.glob(f"*/{RESULT_FILE}")]
    contents.sort(key=lambda analysis: analysis["step"])
    whole = table[table["kind"] == "whole"].sort_values("step")
    charts = [_numbers(contents[-1], name), _agreement(table, name)]
    if (table["kind"] == "size").any():
        charts.append(_relative_error(table, name))
    if (table["kind"] == "eta").sum() + 1 >= MIN_POINTS:
        charts.append(_step_size(table, name))
    if len(whole) > 1:
        charts.append(_evolution(whole, name, run))
    if contents[-1]["tables"].get("conditioning"):
        charts.append(_conditioning(contents[-1], name))
    headings = ["step", "U", *(STYLES[key][0] for key in IN_TABLE), "ESS / N", "H"]
    verdicts = [sentence for content in contents if (sentence := verdict(content["step"] + 1, content["results"]))]
    return AnalysesSection(name, verdicts, charts, headings, _rows(table))


def core_numbers(analysis: Mapping[str, Any]) -> dict[str, float]:
    """Returns the core numbers of an analysis for dashboards, under offline/…, without those that are not available."""
    names = ("deltaH1", "deltaH_true", "deltaH_odd", "paired_error", "H_orig", "ESS", "avg_reward")
    results = analysis["results"]
    return {f"offline/{name}": results[name] for name in names if _is_there(results, name)}


def _rows(table: pd.DataFrame) -> list[list[str]]:
    shown = table[table["kind"].isin(["whole", "update"])].sort_values(["step", "kind"], ascending=[True, False])
    return [
        [
            str(row["step"] + 1),
            "{update_prompts:.0f} prompts, seed {update_seed:.0f}".format(**row)
            + ", filtered" * row["update_filtered"],
            *(_with_error(row[key], row[f"{key}_se"]) for key in IN_TABLE),
            MISSING if math.isnan(row["ESS"]) else f"{row['ESS'] / row['evaluation_size']:.3f}",
            MISSING if math.isnan(row["H_orig"]) else f"{row['H_orig']:.4f}",
        ]
        for row in shown.to_dict("records")
    ]


def _with_error(value: float, stderr: float) -> str:
    return MISSING if math.isnan(value) else plus_minus(MILLI * value, MILLI * Z_95 * stderr, "+")


def _is_there(results: Mapping[str, Any], key: str) -> bool:
    return math.isfinite(results.get(key, math.nan))


def _chart(
    folder: str,
    key: str,
    title: str,
    caption: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    why: str = "",
    **more: Any,
) -> Chart:
    """Returns the chart of the analyses in this folder; without series, one that says why."""
    missing = [] if series else [why]
    return draw(f"offline_{folder}_{key}", f"Offline {folder}: {title}", caption, missing, series, y, x, **more)


def _numbers(content: Mapping[str, Any], name: str) -> Chart:
    """Returns the chart of a result.json: a row for each number with its 95 % interval, per token."""
    results = content["results"]
    rows = [(key, *STYLES[key]) for key in IN_TABLE if _is_there(results, key)]
    for split, words in SPLITS.items():
        keys = [key for key in results if key.startswith(f"deltaH1/{split}/") and _is_there(results, key)]
        parts = [key for key in keys if "_se" not in key and not key.endswith("_sequence")]
        if 1 < len(parts) <= MOST_ROWS:
            rows += [(key, f"{words}: {key.rpartition('/')[2]}", BLUE, "circle") for key in parts]
    series = [
        _with_bars(label, color, mark, [results[key]], [label], [results.get(f"{key}_se", math.nan)])
        for key, label, color, mark in rows
    ]
    caption = (
        f"The step after checkpoint {content['step']}, 95 % intervals, from {results['B_E']:.0f} evaluation sequences "
        f"and {results['B_U']:.0f} × {results['G']:.0f} update sequences, sampled independently. The prediction's "
        "interval has the noise of both. Prediction and truth share E, so their difference is known more precisely. "
        "Odd is half the difference of a step and a step back: the second order cancels. Causes, kinds of module and "
        "layers each add up to the prediction."
    )
    missing = "neither prediction nor truth is a finite number"
    x, y = Axis("change of token entropy, 1e-3 nats"), Axis("", "names", names=[label for _, label, _, _ in rows])
    title, height = f"step {content['step'] + 1}", 30 + 24 * len(rows)
    return _chart(name, "step", title, caption, series, x, y, missing, rules={"x": [0]}, height=height)


def _with_bars(
    label: str,
    color: str,
    mark: str,
    x: Sequence[float],
    y: Sequence[Any],
    x_stderr: Sequence[float],
    y_stderr: Sequence[float] = (),
) -> Series:
    """Returns a cloud in thousandths of a nat with 95 % intervals. The y of names have none."""

    def ends(values: Sequence[float], stderrs: Sequence[float], sign: int) -> list[float]:
        return [MILLI * (value + sign * Z_95 * stderr) for value, stderr in zip(values, stderrs, strict=True)]

    left, right = (ends(x, x_stderr, sign) for sign in (-1, 1))
    low, high = (ends(y, y_stderr, sign) for sign in (-1, 1)) if y_stderr else ((), ())
    y = [MILLI * value for value in y] if y_stderr else y
    return Series(label, color, [MILLI * value for value in x], y, low, high, left, right,
                  line=False, mark=mark, band=False)  # fmt: skip


def _agreement(table: pd.DataFrame, name: str) -> Chart:
    shown = table[table["kind"] != "size"].dropna(subset=["deltaH1", "deltaH_true"])
    series = []
    for truth in ("deltaH_true", "deltaH_odd"):
        rows = shown.dropna(subset=[truth])
        values = (rows[column].to_list() for column in (truth, "deltaH1", f"{truth}_se", "deltaH1_se"))
        series.append(_with_bars(*STYLES[truth], *values))
    rows = shown[shown["kind"] != "eta"].dropna(subset=["covariance"])
    if len(rows) >= MIN_POINTS:
        x, y = rows["deltaH_true"].to_numpy(), rows["covariance"].to_numpy()
        r = {key: np.corrcoef(x, rows[key])[0, 1] for key in ("deltaH1", "covariance")}
        label = f"−Cov(log π, A), scaled: r = {r['covariance']:.2f} (predicted: {r['deltaH1']:.2f})"
        series.append(Series(label, ORANGE, MILLI * x, MILLI * scaled(y, x), line=False, mark="triangle"))
    series = [one for one in series if len(one.x)]
    caption = (
        "Each point is one step from a checkpoint, predicted from independent samples and measured on the same "
        "evaluation sequences, so points lie closer to the line than their bars (95 % intervals) suggest. The gap "
        "between the diamonds and the line is the step's second order; green excludes it. Triangles, with several "
        "steps: the covariance of arXiv 2505.22617, times the one factor that fits best; r is the correlation with the "
        "measured change."
    )
    missing, title = "prediction or truth was not asked for", "prediction against truth"
    x_axis, y_axis = Axis("measured change of token entropy (1e-3 nats)"), Axis("predicted (1e-3 nats)")
    shown_series = [diagonal(series, "y = x"), *series] if series else []
    return _chart(name, "agreement", title, caption, shown_series, x_axis, y_axis, missing)


def _relative_error(table: pd.DataFrame, name: str) -> Chart:
    sizes, whole = table[table["kind"] == "size"], table[table["kind"] == "whole"].set_index("step")
    truth = sizes["step"].map(whole["deltaH_odd"].fillna(whole["deltaH_true"]).abs())
    series = []
    for key, (label, color, mark) in STYLES.items():
        error = (Z_95 * sizes[f"{key}_se"] / truth).groupby(sizes["evaluation_size"]).mean().dropna()
        series.append(Series(label, color, list(error.index), list(error), mark=mark))
    caption = (
        "The relative error of each number against the number of evaluation sequences (relative to the change of first "
        "order, measured on all of E; means over checkpoints). The sets are nested: each is the beginning of the next. "
        "A difference on the same sequences is known far more precisely than either of its parts."
    )
    x, y = Axis("|E|, sequences", "log", base=2), Axis("half of the 95 % interval over |ΔH|", "log")
    return _chart(name, "sizes", "error against |E|", caption, series, x, y)


def log_slope(etas: np.ndarray, changes: np.ndarray) -> tuple[float, float]:
    """Returns slope and R² of log|ΔH| on log η: 1 where the change is of first order.

    >>> slope, fit = log_slope(np.array([0.25, 0.5, 1.0]), np.array([-0.5, -1.0, -2.0]))
    >>> round(slope, 6), round(fit, 6)
    (1.0, 1.0)
    """
    x, y = np.log(etas), np.log(np.abs(changes))
    return float(np.polyfit(x, y, 1)[0]), float(np.corrcoef(x, y)[0, 1] ** 2)


def _step_size(table: pd.DataFrame, name: str) -> Chart:
    shown = table[table["kind"].isin(["whole", "eta"])].sort_values("eta")
    series = []
    for step, of_step in shown.groupby("step"):
        first = step == shown["step"].min()
        for key in ("deltaH1", "deltaH_true", "deltaH_snis", "deltaH_odd"):
            label, color, mark = STYLES[key]
            rows = of_step.dropna(subset=[key])
            etas, changes = rows["eta"].to_numpy(), rows[key].to_numpy()
            if first and len(rows) >= MIN_POINTS and key != "deltaH1":
                label = "{}: slope {:.3f}, R² {:.6f}".format(label, *log_slope(etas, changes))
            elif not first:
                label = f"{label}, step {step + 1}"
            values = MILLI * np.abs(changes)
            series.append(Series(label, color, etas, values, mark=mark, faint=1.0 if first else 0.3))
    caption = (
        "The measured change for fractions of the step, on logarithmic axes: first order is a line of slope 1. Strong "
        "lines and slopes are those of the first checkpoint, faint lines others."
    )
    x, y = Axis("η, multiple of the step", "log", base=2), Axis("|ΔH|, 1e-3 nats per token", "log")
    return _chart(name, "eta", "the change against the step's size", caption, series, x, y)


def _evolution(whole: pd.DataFrame, name: str, run: Run | None) -> Chart:
    series = []
    if run is not None and run.known("delta_h/forward"):
        series.append(line("in training: forward", curve(run.measured("delta_h/forward")), GREY))
    for key, offset in (("deltaH1", -0.15), ("deltaH_true", 0.15)):
        label, color, mark = STYLES[key]
        half = Z_95 * whole[f"{key}_se"].fillna(0)
        steps, ends = list(whole["step"] + 1 + offset), (list(whole[key] - half), list(whole[key] + half))
        series.append(
            Series(f"{label} offline", color, steps, list(whole[key]), *ends, line=False, mark=mark, band=False)
        )
    caption = (
        "The step after each checkpoint, from separate samples, beside the probe's value in training (grey, where it "
        "ran); 95 % intervals. The two use different batches: they agree within their errors, not at each step."
    )
    y = Axis("change of token entropy by this step's update (nats per token)")
    return _chart(name, "checkpoints", "over checkpoints", caption, series, Axis(STEP), y, rules={"y": [0]})


def _conditioning(content: Mapping[str, Any], name: str) -> Chart:
    """Returns the chart of δH₁ under other preconditioners."""
    table = pd.DataFrame(content["tables"]["conditioning"])
    kinds = {"same ‖δθ‖": ("delta_h1", BLUE, "circle"), "same gain in reward": ("delta_h1_same_gain", ORANGE, "square")}
    names = list(table["name"])
    series = [
        Series(label, color, list(MILLI * table[column]), names, line=False, mark=mark)
        for label, (column, color, mark) in kinds.items()
    ]
    caption = (
        f"From checkpoint {content['step']}: the same samples and gradient under other preconditioners, scaled to "
        "the real step's length, or to its first-order gain in reward. No mark where a step would lose reward."
    )
    x, y = Axis("predicted change of token entropy (1e-3 nats)"), Axis("", "names", names=names)
    height, title = 40 + 30 * len(names), "what the preconditioner does"
    return _chart(name, "conditioning", title, caption, series, x, y, rules={"x": [0]}, height=height)
