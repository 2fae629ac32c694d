"""Analyses of a run's checkpoints: their pictures, one table, one page, for RUN/offline/NAME and the run's report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rl_training.records.analyses import OFFLINE, RESULT_FILE, Z_95, analysis_results, read_analysis, verdict
from rl_training.records.atomic_write import write_atomically
from rl_training.records.report.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, Draw, Picture, legend, line, picture
from rl_training.records.report.page import render
from rl_training.records.report.predictions import MIN_POINTS, scaled
from rl_training.records.report.series import Run, curve
from rl_training.records.report.words import MILLI, MISSING, plus_minus

TABLE_FILE, PAGE_FILE = "sweep.csv", "analyses.html"
STYLES = {  # of a result: its name, colour and marker
    "deltaH1": ("predicted", BLUE, "o"),
    "deltaH_true": ("measured", BLACK, "D"),
    "paired_error": ("predicted − measured", ORANGE, "^"),
    "deltaH_odd": ("measured, odd", GREEN, "s"),
    "paired_error_odd": ("predicted − odd", GREEN, "v"),
    "deltaH_snis": ("measured (SNIS)", GREY, "d"),
}
IN_TABLE = list(STYLES)[:5]
SPLITS = {"part": "cause", "kind": "kind", "layer": "layer"}
MOST_ROWS = 40  # of a split; a deep model's layers are in the table of results


@dataclass(frozen=True)
class AnalysesSection:
    """What a page shows of the analyses of one name."""

    name: str
    verdicts: list[str]  # sentences on steps where the first order fails
    pictures: list[Picture]
    headings: list[str]
    rows: list[list[str]]  # of cells, in thousandths of a nat per token


def write_analyses_page(folder: Path, section: AnalysesSection) -> Path:
    """Returns the page that it wrote of the analyses in RUN/offline/NAME; pictures and a CSV table lie beside it."""
    page = folder / PAGE_FILE
    files = {folder / TABLE_FILE: analysis_results(folder).to_csv(index=False).encode()}
    files |= {folder / drawn.file: drawn.png for drawn in section.pictures if drawn.png}
    write_atomically({**files, page: render("analyses.html", section=section).encode()})
    return page


def analyses_of(run: Run, known: Mapping[Path, AnalysesSection]) -> list[AnalysesSection]:
    """Returns a section for each name in RUN/offline that has results; `known`, by folder, need no drawing again."""
    names = {path.parents[1] for path in (run.folder / OFFLINE).glob(f"*/*/{RESULT_FILE}")}
    return [known.get(folder) or describe_analyses(folder, run) for folder in sorted(names)]


def describe_analyses(folder: Path, run: Run | None) -> AnalysesSection:
    """Returns what is to be shown of the analyses in a folder: pictures of what was varied, and a row per checkpoint.

    run  whose in-loop predictions are drawn beside them
    """
    table, name = analysis_results(folder), folder.name
    contents = [read_analysis(path) for path in folder.glob(f"*/{RESULT_FILE}")]
    contents.sort(key=lambda analysis: analysis["step"])
    whole = table[table["kind"] == "whole"].sort_values("step")
    pictures = [_numbers(contents[-1], name), _agreement(table, name)]
    if (table["kind"] == "size").any():
        pictures.append(_relative_error(table, name))
    if (table["kind"] == "eta").sum() + 1 >= MIN_POINTS:
        pictures.append(_step_size(table, name))
    if len(whole) > 1:
        pictures.append(_evolution(whole, name, run))
    if contents[-1]["tables"].get("conditioning"):
        pictures.append(_conditioning(contents[-1], name))
    headings = ["step", "U", *(STYLES[key][0] for key in IN_TABLE), "ESS / N", "H"]
    verdicts = [sentence for content in contents if (sentence := verdict(content["step"] + 1, content["results"]))]
    return AnalysesSection(name, verdicts, pictures, headings, _rows(table))


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


def _picture(
    name: str, key: str, title: str, caption: str, draw: Draw | None, why: str = "", height: float = 4
) -> Picture:
    """Returns the picture of the analyses of this name; without `draw`, one that says why."""
    file, title, over_steps = f"offline_{name}_{key}.png", f"Offline {name}: {title}", key == "checkpoints"
    return picture(file, title, caption, [] if draw else [why], draw, height, over_steps)


def _numbers(content: Mapping[str, Any], name: str) -> Picture:
    """Returns the picture of a result.json: a row for each number with its 95 % interval, per token."""
    results = content["results"]
    rows = [(key, *STYLES[key]) for key in IN_TABLE if _is_there(results, key)]
    begins: list[int] = []  # of a split
    for split, words in SPLITS.items():
        keys = [key for key in results if key.startswith(f"deltaH1/{split}/") and _is_there(results, key)]
        parts = [key for key in keys if "_se" not in key and not key.endswith("_sequence")]
        if 1 < len(parts) <= MOST_ROWS:
            begins.append(len(rows))
            rows += [(key, f"{words}: {key.rpartition('/')[2]}", BLUE, ".") for key in parts]

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=GREY, lw=1)
        for place in begins:
            axes.axhline(place - 0.5, color=GREY, lw=1)
        for place, (key, label, color, marker) in enumerate(rows):
            half = Z_95 * MILLI * results.get(f"{key}_se", math.nan)
            axes.errorbar(MILLI * results[key], place, xerr=half, fmt=marker, color=color, ms=6, lw=1.6, label=label)
        axes.set_yticks(np.arange(len(rows)), [label for _, label, _, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("change of token entropy, 1e-3 nats")

    caption = (
        f"The step after checkpoint {content['step']}, 95 % intervals, from {results['B_E']:.0f} evaluation sequences "
        f"and {results['B_U']:.0f} × {results['G']:.0f} update sequences, sampled independently. The prediction's "
        "interval has the noise of both. Prediction and truth share E, so their difference is known more precisely. "
        "Odd is half the difference of a step and a step back: the second order cancels. Causes, kinds of module and "
        "layers each add up to the prediction."
    )
    missing = "neither prediction nor truth is a finite number"
    height = 1.0 + 0.3 * len(rows)
    return _picture(name, "step", f"step {content['step'] + 1}", caption, draw if rows else None, missing, height)


def _agreement(table: pd.DataFrame, name: str) -> Picture:
    shown = table[table["kind"] != "size"].dropna(subset=["deltaH1", "deltaH_true"])

    def draw(axes: Axes) -> None:
        for truth in ("deltaH_true", "deltaH_odd"):
            label, color, marker = STYLES[truth]
            rows = shown.dropna(subset=[truth])
            if len(rows):
                x, y = MILLI * rows[truth], MILLI * rows["deltaH1"]
                bars = {"xerr": MILLI * Z_95 * rows[f"{truth}_se"], "yerr": MILLI * Z_95 * rows["deltaH1_se"].fillna(0)}
                axes.errorbar(x, y, **bars, fmt=marker, color=color, ms=4, lw=1, alpha=0.8, label=label)
        rows = shown[shown["kind"] != "eta"].dropna(subset=["covariance"])
        if len(rows) >= MIN_POINTS:
            x, y = rows["deltaH_true"].to_numpy(), rows["covariance"].to_numpy()
            r = {key: np.corrcoef(x, rows[key])[0, 1] for key in ("deltaH1", "covariance")}
            label = f"−Cov(log π, A), scaled: r = {r['covariance']:.2f} (predicted: {r['deltaH1']:.2f})"
            axes.plot(MILLI * x, MILLI * scaled(y, x), "^", color=ORANGE, ms=5, mew=0, label=label)
        axes.axline((0, 0), slope=1, color=GREY, lw=1.2, ls="--", label="y = x")
        axes.set_xlabel("measured change of token entropy (1e-3 nats)")
        axes.set_ylabel("predicted (1e-3 nats)")
        legend(axes)

    caption = (
        "Each point is one step from a checkpoint, predicted from independent samples and measured on the same "
        "evaluation sequences, so points lie closer to the line than their bars (95 % intervals) suggest. The gap "
        "between black and the line is the step's second order; green excludes it. Triangles, with several steps: the "
        "covariance of arXiv 2505.22617, times the one factor that fits best; r is the correlation with the measured "
        "change."
    )
    missing = "prediction or truth was not asked for"
    return _picture(name, "agreement", "prediction against truth", caption, draw if len(shown) else None, missing)


def _relative_error(table: pd.DataFrame, name: str) -> Picture:
    sizes, whole = table[table["kind"] == "size"], table[table["kind"] == "whole"].set_index("step")
    truth = sizes["step"].map(whole["deltaH_odd"].fillna(whole["deltaH_true"]).abs())

    def draw(axes: Axes) -> None:
        for key, (label, color, marker) in STYLES.items():
            error = (Z_95 * sizes[f"{key}_se"] / truth).groupby(sizes["evaluation_size"]).mean().dropna()
            if len(error):
                axes.plot(error.index, error, f"{marker}-", color=color, ms=4, lw=1.6, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted(sizes["evaluation_size"].unique())
        axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
        axes.set_xlabel("|E|, sequences")
        axes.set_ylabel("half of the 95 % interval over |ΔH|")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    caption = (
        "The relative error of each number against the number of evaluation sequences (relative to the change of first "
        "order, measured on all of E; means over checkpoints). The sets are nested: each is the beginning of the next. "
        "A difference on the same sequences is known far more precisely than either of its parts."
    )
    return _picture(name, "sizes", "error against |E|", caption, draw)


def log_slope(etas: np.ndarray, changes: np.ndarray) -> tuple[float, float]:
    """Returns slope and R² of log|ΔH| on log η: 1 where the change is of first order.

    >>> slope, fit = log_slope(np.array([0.25, 0.5, 1.0]), np.array([-0.5, -1.0, -2.0]))
    >>> round(slope, 6), round(fit, 6)
    (1.0, 1.0)
    """
    x, y = np.log(etas), np.log(np.abs(changes))
    return float(np.polyfit(x, y, 1)[0]), float(np.corrcoef(x, y)[0, 1] ** 2)


def _step_size(table: pd.DataFrame, name: str) -> Picture:
    shown = table[table["kind"].isin(["whole", "eta"])].sort_values("eta")

    def draw(axes: Axes) -> None:
        for step, at in shown.groupby("step"):
            strong = step == shown["step"].min()
            for key in ("deltaH1", "deltaH_true", "deltaH_snis", "deltaH_odd"):
                label, color, marker = STYLES[key]
                rows = at.dropna(subset=[key])
                etas, changes = rows["eta"].to_numpy(), rows[key].to_numpy()
                if strong and len(rows) >= MIN_POINTS and key != "deltaH1":
                    label = "{}: slope {:.3f}, R² {:.6f}".format(label, *log_slope(etas, changes))
                style = {"alpha": 1.0, "label": label} if strong and len(rows) else {"alpha": 0.3}
                axes.plot(etas, MILLI * np.abs(changes), f"{marker}-", color=color, ms=4, lw=1.4, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("η, multiple of the step")
        axes.set_ylabel("|ΔH|, 1e-3 nats per token")
        axes.legend(loc="upper left")

    caption = (
        "The measured change for fractions of the step, on logarithmic axes: first order is a line of slope 1. Strong "
        "lines and slopes are those of the first checkpoint, faint lines others."
    )
    return _picture(name, "eta", "the change against the step's size", caption, draw)


def _evolution(whole: pd.DataFrame, name: str, run: Run | None) -> Picture:
    def draw(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1)
        if run is not None and run.known("delta_h/forward"):
            line(axes, curve(run.measured("delta_h/forward")), GREY, "-", "in training: forward")
        for key, offset in (("deltaH1", -0.15), ("deltaH_true", 0.15)):
            label, color, marker = STYLES[key]
            steps, half = whole["step"] + 1 + offset, Z_95 * whole[f"{key}_se"].fillna(0)
            axes.errorbar(steps, whole[key], half, fmt=marker, color=color, ms=5, lw=1.4, label=f"{label} offline")
        axes.set_ylabel("change of token entropy\nby this step's update (nats per token)")
        legend(axes)

    caption = (
        "The step after each checkpoint, from separate samples, beside the probe's value in training (grey, where it "
        "ran); 95 % intervals. The two use different batches: they agree within their errors, not at each step."
    )
    return _picture(name, "checkpoints", "over checkpoints", caption, draw)


def _conditioning(content: Mapping[str, Any], name: str) -> Picture:
    """Returns the picture of δH₁ under other preconditioners."""
    table = pd.DataFrame(content["tables"]["conditioning"])
    places = np.arange(len(table))

    def draw(axes: Axes) -> None:
        axes.barh(places - 0.2, MILLI * table["delta_h1"], 0.38, color=BLUE, label="same ‖δθ‖")
        axes.barh(places + 0.2, MILLI * table["delta_h1_same_gain"], 0.38, color=ORANGE, label="same gain in reward")
        axes.axvline(0, color=GREY, lw=1)
        axes.set_yticks(places, table["name"])
        axes.invert_yaxis()
        axes.set_xlabel("predicted change of token entropy (1e-3 nats)")
        legend(axes)

    caption = (
        f"From checkpoint {content['step']}: the same samples and gradient under other preconditioners, scaled to "
        "the real step's length, or to its first-order gain in reward. No bar where a step would lose reward."
    )
    return _picture(name, "conditioning", "what the preconditioner does", caption, draw)
