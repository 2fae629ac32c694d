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

from rl_training.records.analyses import OFFLINE, RESULT_FILE, analysis_results, read_analysis
from rl_training.records.atomic_write import write_atomically
from rl_training.records.report.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, Picture, legend, line, picture
from rl_training.records.report.one_analysis import one_analysis
from rl_training.records.report.page import render
from rl_training.records.report.plane import Interventions, interventions_of
from rl_training.records.report.series import Run, curve
from rl_training.records.report.summary import MILLI
from rl_training.records.verdict import verdict

TABLE_FILE, PAGE_FILE = "sweep.csv", "analyses.html"
MIN_POINTS = 3  # of a line whose slope is to mean something
HEADINGS = {
    "deltaH1": "predicted", "deltaH_true": "measured", "paired_error": "predicted − measured",
    "deltaH_odd": "measured, odd", "paired_error_odd": "predicted − odd",
}  # fmt: skip


@dataclass(frozen=True)
class AnalysesSection:
    """What a page shows of the analyses of one name."""

    name: str
    verdicts: list[str]  # sentences on steps where the first order fails
    pictures: list[Picture]
    headings: list[str]
    rows: list[list[str]]  # of cells, in thousandths of a nat per token
    interventions: list[Interventions]  # of each checkpoint


def write_analyses_page(folder: Path, section: AnalysesSection) -> Path:
    """Returns the page that it wrote of the analyses in RUN/offline/NAME; pictures and a CSV table lie beside it."""
    page = folder / PAGE_FILE
    files = {folder / TABLE_FILE: analysis_results(folder).to_csv(index=False).encode()}
    pictures = [*section.pictures, *(told.picture for told in section.interventions)]
    files |= {folder / drawn.file: drawn.png for drawn in pictures}
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
    table = analysis_results(folder)
    whole = table[table["kind"] == "whole"].sort_values("step")
    contents = sorted(
        (read_analysis(path) for path in folder.glob(f"*/{RESULT_FILE}")), key=lambda analysis: analysis["step"]
    )
    drawn = [one_analysis(contents[-1], folder.name), _agreement(table, folder.name)]
    if (table["kind"] == "size").any():
        drawn.append(_relative_error(table, folder.name))
    if (table["kind"] == "eta").sum() + 1 >= MIN_POINTS:
        drawn.append(_step_size(table, folder.name))
    if len(whole) > 1:
        drawn.append(_evolution(whole, folder.name, run))
    conditioning = _conditioning(contents[-1], folder.name)
    if conditioning is not None:
        drawn.append(conditioning)
    headings = ["step", "U", *HEADINGS.values(), "ESS / N", "H"]
    verdicts = [told for analysis in contents if (told := verdict(analysis["step"] + 1, analysis["results"]))]
    return AnalysesSection(folder.name, verdicts, drawn, headings, [_cells(row) for row in _whole_and_updates(table)],
                        [told for content in contents for told in interventions_of(content, folder.name)])  # fmt: skip


def _whole_and_updates(table: pd.DataFrame) -> list[Mapping[str, Any]]:
    shown = table[table["kind"].isin(["whole", "update"])].sort_values(["step", "kind"], ascending=[True, False])
    return shown.to_dict("records")


def _cells(row: Mapping[str, Any]) -> list[str]:
    filtered = ", filtered" if row["update_filtered"] else ""
    return [
        str(int(row["step"]) + 1),
        f"{row['update_prompts']:.0f} prompts, seed {row['update_seed']:.0f}{filtered}",
        *(_with_error(row[name], row[f"{name}_se"]) for name in HEADINGS),
        "–" if math.isnan(row["ESS"]) else f"{row['ESS'] / row['evaluation_size']:.3f}",
        "–" if math.isnan(row["H_orig"]) else f"{row['H_orig']:.4f}",
    ]


def _with_error(value: float, stderr: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{MILLI * value:+.3f}" + ("" if math.isnan(stderr) else f" ± {MILLI * stderr:.3f}")


def _agreement(table: pd.DataFrame, name: str) -> Picture:
    shown = table[table["kind"] != "size"].dropna(subset=["deltaH1", "deltaH_true"])

    def draw(axes: Axes) -> None:
        ends = [0.0]
        for truth, color, marker, label in (
            ("deltaH_true", BLACK, "o", "measured"), ("deltaH_odd", GREEN, "s", "measured without second order"),
        ):  # fmt: skip
            rows = shown.dropna(subset=[truth])
            if len(rows):
                x, y = MILLI * rows[truth], MILLI * rows["deltaH1"]
                bars = {"xerr": MILLI * rows[f"{truth}_se"], "yerr": MILLI * rows["deltaH1_se"].fillna(0)}
                axes.errorbar(x, y, **bars, fmt=marker, color=color, ms=4, lw=1, alpha=0.8, label=label)
                ends += [x.min(), x.max(), y.min(), y.max()]
        rows = shown[shown["kind"] != "eta"].dropna(subset=["covariance"])
        if len(rows) >= MIN_POINTS:
            x, y = rows["deltaH_true"].to_numpy(), rows["covariance"].to_numpy()
            r = {key: np.corrcoef(x, rows[key])[0, 1] for key in ("deltaH1", "covariance")}
            label = f"−Cov(log π, A), scaled: r = {r['covariance']:.2f} (predicted: {r['deltaH1']:.2f})"
            axes.plot(MILLI * x, MILLI * y * (x @ y) / (y @ y), "^", color=ORANGE, ms=5, mew=0, label=label)
        axes.axline((0, 0), slope=1, color=GREY, lw=1.2, ls="--", label="y = x")
        axes.set_xlabel("measured change of token entropy (1e-3 nats)")
        axes.set_ylabel("predicted (1e-3 nats)")
        legend(axes)

    caption = (
        "Each point is one step from a checkpoint, predicted from independent samples and measured on the same "
        "evaluation sequences, so points lie closer to the line than their bars (one standard error) suggest. The gap "
        "between black and the line is the step's second order; green excludes it. Triangles, with several steps: the "
        "covariance of arXiv 2505.22617, times the one factor that fits best; r is the correlation with the measured "
        "change."
    )
    missing = [] if len(shown) else ["prediction or truth was not asked for"]
    return picture(
        f"offline_{name}_agreement.png", f"Offline {name}: prediction against truth", caption, missing,
        draw if len(shown) else None, over_steps=False,
    )  # fmt: skip


def _relative_error(table: pd.DataFrame, name: str) -> Picture:
    sizes = table[table["kind"] == "size"]
    styles = {
        "deltaH1": (BLUE, "o-", "predicted"), "deltaH_true": (BLACK, "s-", "measured"),
        "deltaH_snis": (GREY, "d-", "measured (SNIS)"), "paired_error": (ORANGE, "^-", "predicted − measured"),
        "paired_error_odd": (GREEN, "v-", "predicted − odd"),
    }  # fmt: skip

    def draw(axes: Axes) -> None:
        whole = table[table["kind"] == "whole"].set_index("step")
        truth = whole["deltaH_odd"].fillna(whole["deltaH_true"]).abs()
        relative = sizes.assign(truth=sizes["step"].map(truth))
        for key, (color, style, label) in styles.items():
            error = (relative[f"{key}_se"] / relative["truth"]).groupby(relative["evaluation_size"]).mean().dropna()
            if len(error):
                axes.plot(error.index, error.values, style, color=color, ms=4, lw=1.6, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted(sizes["evaluation_size"].unique())
        axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
        axes.set_xlabel("|E|, sequences")
        axes.set_ylabel("standard error over |ΔH|")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    caption = (
        "The relative error of each number against the number of evaluation sequences (relative to the change of first "
        "order, measured on all of E; means over checkpoints). The sets are nested: each is the beginning of the next. "
        "A difference on the same sequences is known far more precisely than either of its parts."
    )
    title = f"Offline {name}: error against |E|"
    return picture(f"offline_{name}_sizes.png", title, caption, [], draw, over_steps=False)


def log_slope(etas: np.ndarray, changes: np.ndarray) -> tuple[float, float]:
    """Returns slope and R² of log|ΔH| on log η: 1 where the change is of first order.

    >>> slope, fit = log_slope(np.array([0.25, 0.5, 1.0]), np.array([-0.5, -1.0, -2.0]))
    >>> round(slope, 6), round(fit, 6)
    (1.0, 1.0)
    """
    x, y = np.log(etas), np.log(np.abs(changes))
    slope, level = np.polyfit(x, y, 1)
    left = y - (slope * x + level)
    return float(slope), float(1 - (left @ left) / ((y - y.mean()) @ (y - y.mean())))


def _step_size(table: pd.DataFrame, name: str) -> Picture:
    shown = table[table["kind"].isin(["whole", "eta"])].sort_values("eta")
    styles = {
        "deltaH1": (BLUE, "--", "predicted"), "deltaH_true": (BLACK, "o-", "measured"),
        "deltaH_snis": (GREY, "d-", "SNIS"), "deltaH_odd": (GREEN, "s-", "odd"),
    }  # fmt: skip

    def draw(axes: Axes) -> None:
        for step, at in shown.groupby("step"):
            strong = step == shown["step"].min()
            for key, (color, style, label) in styles.items():
                rows = at.dropna(subset=[key])
                etas, changes = rows["eta"].to_numpy(), rows[key].to_numpy()
                if strong and len(rows) >= MIN_POINTS and key != "deltaH1":
                    slope, fit = log_slope(etas, changes)
                    label = f"{label}: slope {slope:.3f}, R² {fit:.6f}"
                words = label if strong and len(rows) else None
                alpha = 1.0 if strong else 0.3
                axes.plot(etas, MILLI * np.abs(changes), style, color=color, ms=4, lw=1.4, alpha=alpha, label=words)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("η, multiple of the step")
        axes.set_ylabel("|ΔH|, 1e-3 nats per token")
        axes.legend(loc="upper left")

    caption = (
        "The measured change for fractions of the step, on logarithmic axes: first order is a line of slope 1. Strong "
        "lines and slopes are those of the first checkpoint, faint lines others."
    )
    return picture(
        f"offline_{name}_eta.png", f"Offline {name}: the change against the step's size", caption, [], draw,
        over_steps=False,
    )  # fmt: skip


def _evolution(whole: pd.DataFrame, name: str, run: Run | None) -> Picture:
    def draw(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1)
        if run is not None:
            forward = curve(run.measured("delta_h/forward"))
            if forward.steps:
                line(axes, forward, GREY, "-", "in training: forward")
        steps = whole["step"] + 1
        for key, color, marker, label, offset in (
            ("deltaH1", BLUE, "o", "predicted offline", -0.15), ("deltaH_true", BLACK, "D", "measured offline", 0.15),
        ):  # fmt: skip
            axes.errorbar(
                steps + offset, whole[key], 1.96 * whole[f"{key}_se"].fillna(0), fmt=marker, color=color, ms=5, lw=1.4,
                label=label,
            )  # fmt: skip
        axes.set_ylabel("change of token entropy\nby this step's update (nats per token)")
        legend(axes)

    caption = (
        "The step after each checkpoint, from separate samples, beside the probe's value in training (grey, where it "
        "ran); 95 % intervals. The two use different batches: they agree within their errors, not at each step."
    )
    return picture(f"offline_{name}_checkpoints.png", f"Offline {name}: over checkpoints", caption, [], draw)


def _conditioning(content: Mapping[str, Any], name: str) -> Picture | None:
    """Returns the picture of δH₁ under other preconditioners; None where there is none."""
    rows = content["tables"].get("conditioning")
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        names = [row["name"] for row in rows]
        places = np.arange(len(rows))
        for offset, key, color, label in (
            (-0.2, "delta_h1", BLUE, "same ‖δθ‖"), (0.2, "delta_h1_same_gain", ORANGE, "same gain in reward"),
        ):  # fmt: skip
            values = [MILLI * row[key] for row in rows]
            axes.barh(places + offset, values, height=0.38, color=color, label=label)
        axes.axvline(0, color=GREY, lw=1)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.set_xlabel("predicted change of token entropy (1e-3 nats)")
        legend(axes)

    caption = (
        f"From checkpoint {content['step']}: the same samples and gradient under other preconditioners, scaled to "
        "the real step's length, or to its first-order gain in reward. No bar where a step would lose reward."
    )
    return picture(
        f"offline_{name}_conditioning.png", f"Offline {name}: what the preconditioner does", caption, [],
        draw, over_steps=False,
    )  # fmt: skip


def core_numbers(analysis: Mapping[str, Any]) -> dict[str, float]:
    """Returns the core numbers of an analysis for dashboards, under offline/…, without those that are not available."""
    names = ("deltaH1", "deltaH_true", "deltaH_odd", "paired_error", "H_orig", "ESS", "avg_reward")
    results = analysis["results"]
    return {f"offline/{name}": results[name] for name in names if math.isfinite(results.get(name, math.nan))}
