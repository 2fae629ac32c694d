"""Tables and picture of calibration.py, made from the records of its runs."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import vl_convert
from PIL import Image
from torch import Tensor

from rl_training import Estimate
from rl_training.records.jsonl import read_estimates
from rl_training.records.pages.charts import BLUE, GREEN, GREY, ORANGE, TEXT, Series
from rl_training.records.pages.drawing import draw as chart
from rl_training.records.pages.page import VEGA_LITE
from rl_training.statistics.calibration import calibration, interval_covers
from rl_training.statistics.jackknife import jackknife_stderr

DRAWN = ("rate 1e-4", "default", "rate 1e-3")
TRUE, SAME_BATCH = "delta_h/true", "delta_h/same_batch_snis"
PREDICTIONS = ("delta_h/forward", "delta_h/backward", "delta_h/trapezoid", "delta_h/reuse", SAME_BATCH)
LINEARITY_STEP = 11  # Adam is warm by then
EXPONENTS = range(-6, 2)  # η = 2^e
SMALL = -2  # exponents up to this one are small steps
MIN_ESS_FRACTION = 0.5  # below this, importance weights are not trusted
Run = dict[str, dict[int, Estimate]]  # all estimates of a run, by name and by the step they describe


class Pair(NamedTuple):
    """A prediction and the measured truth for the same step."""

    prediction: Estimate
    truth: Estimate


def read_run(folder: Path) -> Run:
    run: Run = {}
    for row in read_estimates(folder):
        estimate = Estimate(row["value"], row["stderr"], row["num_samples"], row["reason"])
        run.setdefault(row["name"], {})[row["about_step"]] = estimate
    return run


def paired_effects(runs: Sequence[Run], name: str, steps: int) -> list[Pair]:
    return [Pair(run[name][step], run[TRUE][step]) for run in runs for step in range(1, steps + 1)]


# --- the tables -------------------------------------------------------------------------------------------------------


def ratio_of_sums(pairs: Sequence[Pair]) -> Estimate:
    """Return Σ prediction / Σ truth with its delete-one-step jackknife standard error."""
    terms = torch.tensor([[p.prediction.value, p.truth.value] for p in pairs], dtype=torch.float64)
    sums = terms.sum(dim=0)

    def ratio(s: Tensor) -> Tensor:
        return s[..., :1] / s[..., 1:]

    return Estimate(float(ratio(sums)), float(jackknife_stderr(ratio, sums, sums - terms)), len(terms))


def prediction_rows(condition: str, runs: Sequence[Run], steps: int) -> Iterator[str]:
    for name in PREDICTIONS:
        pairs = paired_effects(runs, name, steps)
        scores = calibration(pairs)
        measured = sum(pair.truth.value for pair in pairs) / len(runs)
        stderr = math.hypot(*(pair.truth.stderr for pair in pairs)) / len(runs)
        cells = [
            condition,
            f"{measured:+.4f} ± {1.96 * stderr:.4f}",
            f"`{name.removeprefix('delta_h/')}`",
            _with_error(ratio_of_sums(pairs)),
            *(_with_error(scores[key]) for key in ("slope", "slope_corrected", "correlation")),
            *(_cell(scores[key].value) for key in ("sign_agreement", "coverage")),
        ]
        yield f"| {' | '.join(cells)} |"


def sums_row(condition: str, runs: Sequence[Run], steps: int) -> str:
    """Return the table row of sums over whole runs: their means, the ratio of the means, and the interval coverage."""
    sums, held = [], 0
    for run in runs:
        predicted = run["delta_h/cumulative_predicted"][steps]
        truths = [run[TRUE][step] for step in range(1, steps + 1)]
        measured = Estimate(sum(truth.value for truth in truths), math.hypot(*(truth.stderr for truth in truths)))
        sums.append(Pair(predicted, measured))
        error = predicted.value - measured.value
        held += int(interval_covers(error, predicted.stderr, predicted.num_samples, measured.stderr))
    means = [sum(pair[side].value for pair in sums) / len(sums) for side in (0, 1)]
    stderr = math.hypot(*(math.hypot(pair.prediction.stderr, pair.truth.stderr) for pair in sums)) / len(sums)
    ratio = f"{means[0] / means[1]:.3f} ± {1.96 * abs(stderr / means[1]):.3f}"
    return f"| {condition} | {len(runs)} | {means[0]:+.4f} | {means[1]:+.4f} | {ratio} | {held} of {len(runs)} |"


def log_log_line(run: Run, exponents: Sequence[int], step: int) -> tuple[float, float]:
    """Return the slope and R² of a regression of log|ΔH| on log η."""
    x = torch.tensor([float(e) for e in exponents], dtype=torch.float64)
    y = torch.tensor([run[f"linearity/{e}"][step].value for e in exponents], dtype=torch.float64).abs().log2()
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x)), float((x @ y) ** 2 / ((x @ x) * (y @ y)))


def linearity_rows(condition: str, runs: Sequence[Run], step: int) -> Iterator[str]:
    for seed, run in enumerate(runs):
        small = log_log_line(run, [e for e in EXPONENTS if e <= SMALL], step)
        usable = [e for e in EXPONENTS if run[f"linearity_ess/{e}"][step].value >= MIN_ESS_FRACTION]
        whole = log_log_line(run, usable, step)
        first = run[f"linearity/{EXPONENTS[0]}"][step].value / 2.0 ** EXPONENTS[0]
        kept = run["linearity/0"][step].value / first
        cells = [condition, str(seed), f"{run['linearity/0'][step].value:+.5f}"]
        cells += [f"{small[0]:.3f}", f"{small[1]:.4f}", f"2^{usable[-1]}", f"{whole[0]:.3f}", f"{whole[1]:.4f}"]
        yield f"| {' | '.join([*cells, f'{kept:.2f}'])} |"


def _cell(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _with_error(estimate: Estimate) -> str:
    return _cell(estimate.value) + ("" if math.isnan(estimate.stderr) else f" ± {1.96 * estimate.stderr:.2f}")


def print_report(runs: dict[str, list[Run]], steps: int) -> None:
    print(
        "\n| condition | measured ΔH of a run | prediction | Σ predicted / Σ measured | slope | slope, corrected | "
        "correlation | same sign | coverage |\n|---|---|---|---|---|---|---|---|---|"
    )
    for condition, condition_runs in runs.items():
        print("\n".join(prediction_rows(condition, condition_runs, steps)))
    print("\n| condition | runs | Σ predicted | Σ measured | ratio | intervals that hold |\n|---|---|---|---|---|---|")
    for condition, condition_runs in runs.items():
        print(sums_row(condition, condition_runs, steps))
    print(
        "\n| condition | run | ΔH at η = 1 | slope, η ≤ 1/4 | R² | largest η with ESS ≥ N/2 | slope up to it | "
        "R² | ΔH(1) / linear |\n|---|---|---|---|---|---|---|---|---|"
    )
    for condition, condition_runs in runs.items():
        print("\n".join(linearity_rows(condition, condition_runs, min(LINEARITY_STEP, steps))))


# --- the picture ------------------------------------------------------------------------------------------------------


def cumulative(runs: Sequence[Run], name: str, steps: int) -> Tensor:
    """Return (steps,): the estimate summed up to each step, averaged over runs."""
    values = torch.tensor([[run[name][s].value for s in range(1, steps + 1)] for run in runs], dtype=torch.float64)
    return values.mean(dim=0).cumsum(dim=0)


def draw(runs: dict[str, list[Run]], steps: int, path: Path) -> None:
    """Draw the cumulative sums, one panel per learning rate, and the change along a scaled step, two panels per row."""
    styles = {
        TRUE: ("measured on fresh sequences", TEXT, ()),
        "delta_h/trapezoid": ("trapezoid", BLUE, ()),
        "delta_h/forward": ("forward", GREEN, (7, 3)),
        "delta_h/backward": ("backward", "#CC79A7", (7, 3)),
        "delta_h/reuse": ("reuse (naive product)", ORANGE, (2, 2)),
        SAME_BATCH: ("importance weights, same batch", GREY, (2, 2)),
    }
    charts, along, x = [], [], range(1, steps + 1)
    step = min(LINEARITY_STEP, steps)
    for color, (condition, condition_runs) in zip((BLUE, ORANGE, GREEN), runs.items(), strict=False):
        sums = [
            Series(label, ink, x, cumulative(condition_runs, name, steps).tolist(), dash=dash)
            for name, (label, ink, dash) in styles.items()
        ]
        charts.append(replace(chart("overlay_change", sums, branched=False), title=condition))
        for run in condition_runs:
            changes = [1e3 * abs(run[f"linearity/{e}"][step].value) for e in EXPONENTS]
            along.append(Series(condition, color, [2.0**e for e in EXPONENTS], changes, mark="circle"))
    charts.append(replace(chart("eta", along), title="along a scaled step η δθ"))
    specs = [{**drawn.standalone(), "title": drawn.title} for drawn in charts]
    panels = [
        Image.open(io.BytesIO(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=1.5))) for spec in specs
    ]
    width, height = (max(size) for size in zip(*(panel.size for panel in panels), strict=True))
    whole = Image.new("RGB", (2 * width, (len(panels) + 1) // 2 * height), "white")
    for number, panel in enumerate(panels):
        whole.paste(panel, (number % 2 * width, number // 2 * height))
    whole.save(path)
    print(f"\n{path}")
