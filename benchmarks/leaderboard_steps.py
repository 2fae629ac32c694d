"""Table 1: what predictors say of single steps, against what fresh sequences measure."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import predictors
import torch
from leaderboard_scores import Pairs, correlation, coverage, over_runs, sign, slope
from leaderboard_tables import Rows, column, entropies, files_of
from matplotlib.axes import Axes
from tqdm import tqdm

from rl_training import Estimate

SUMMED = 10  # steps, of sums of predictions


def single_steps(run: Mapping[str, Any], said: Sequence[Estimate]) -> Pairs:
    """Returns predictions and truths of the steps that have both."""
    both = [(p, s["truth"]) for p, s in zip(said, run["steps"], strict=True) if s["truth"] and not math.isnan(p.value)]
    return Pairs(*column([p for p, _ in both]), *column([t for _, t in both]))


def sums_along(run: Mapping[str, Any], said: Sequence[Estimate]) -> Pairs:
    """Returns sums of SUMMED predictions, and how entropy changed over these steps: means of three batches each."""
    entropy = entropies(run)
    level = entropy.unfold(0, 3, 1).mean(dim=-1)  # [k]: around step k + 1, from 0
    starts = range(1, len(entropy) - SUMMED - 1, SUMMED)
    values, none = column(said)[0], torch.full((len(starts),), torch.nan, dtype=torch.float64)
    sums = torch.stack([values[start : start + SUMMED].sum() for start in starts])
    measured = torch.stack([level[start - 1 + SUMMED] - level[start - 1] for start in starts])
    return Pairs(sums, none, measured, none)


def table_of_steps(runs: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns a row for each predictor: its scores over all runs, and its correlation by optimizer."""
    optimizers = sorted({optimizer_of(run) for run in runs})
    rows: Rows = []
    for name, module in tqdm(files_of(predictors).items(), desc="predictors"):
        start = time.perf_counter()
        said = [[module.predict(step["facts"]) for step in run["steps"]] for run in runs]
        seconds = (time.perf_counter() - start) / sum(len(of_run) for of_run in said)
        pairs = [single_steps(run, of_run) for run, of_run in zip(runs, said, strict=True)]
        row: dict[str, Any] = {"predictor": name}
        for score in (slope, correlation, sign, coverage):
            row[score.__name__] = over_runs([score(of_run) for of_run in pairs])
        along = [sums_along(run, of_run) for run, of_run in zip(runs, said, strict=True)]
        row[f"correlation, {SUMMED} steps"] = over_runs([correlation(of_run) for of_run in along])
        row["ms a step"] = f"{1000 * (seconds + added_seconds(name, runs)):.1f}"
        for optimizer in optimizers:
            some = [correlation(of)[0] for of, run in zip(pairs, runs, strict=True) if optimizer_of(run) == optimizer]
            row[f"correlation: {optimizer}"] = f"{statistics.fmean(some):.2f}"
        rows.append(row)
    return rows


def optimizer_of(run: Mapping[str, Any]) -> str:
    return str(run["name"]).split("-", 1)[1].rsplit("-", 1)[0]


def added_seconds(name: str, runs: Sequence[Mapping[str, Any]]) -> float:
    """Returns the median time that the engine took for a product, beside what `predict` does with it."""
    engine = statistics.median(step["seconds"]["engine"] for run in runs for step in run["steps"])
    of_others = [step["facts"].products.get("deltaH1") for run in runs for step in run["steps"]]
    fresh = statistics.median(float(e.detail["seconds"]) for e in of_others if e is not None)
    return {"forward": engine, "reuse": engine, "naive_sgd": engine, "deltaH1": fresh}.get(name, 0.0)


def ceiling(runs: Sequence[Mapping[str, Any]]) -> float:
    """Returns the correlation with the truth that the exact change would have: its own noise is √(1 − that²)."""
    of_runs = []
    for run in runs:
        truth = [step["truth"] for step in run["steps"] if step["truth"]]
        values, noise = torch.tensor([(t.value, t.stderr) for t in truth], dtype=torch.float64).unbind(-1)
        of_runs.append(max(0.0, 1.0 - float(noise.square().mean() / values.var())) ** 0.5)
    return statistics.fmean(of_runs)


def draw_steps(axes: Axes, rows: Rows, best: float) -> None:
    """Draws the correlation of each predictor with its interval, best first, and the noise ceiling."""
    order = sorted(rows, key=lambda row: row["correlation"][0])
    for place, row in enumerate(order):
        value, low, high = row["correlation"]
        axes.plot([low, high], [place, place], color="tab:blue", lw=2)
        axes.plot(value, place, "o", color="tab:blue")
    axes.axvline(best, color="gray", ls=":", label="exact prediction: the truth is noisy, too")
    axes.axvline(0, color="black", lw=0.5)
    axes.set_yticks(range(len(order)), [row["predictor"] for row in order])
    axes.set_xlabel("correlation with the measured change, single steps")
    axes.legend(loc="lower right", fontsize="small")
