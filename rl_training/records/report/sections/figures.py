"""The charts of a run's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd

from rl_training.records.evaluated import largest_pass_at
from rl_training.records.pages import charts
from rl_training.records.pages.charts import BLUE, GREEN, NAMED, ORANGE, TEXT, Chart, Series
from rl_training.records.pages.drawing import axis_limits, diagonal, draw, heatmap
from rl_training.records.pages.writing import MILLI, format_estimate
from rl_training.records.report.story.reward_functions import held_out_rewards, reward_functions
from rl_training.records.table.cumulative import NO_LATER_BATCH, naive_sums, sum_starts
from rl_training.records.table.estimates import by_about_step, finite, to_estimates
from rl_training.records.table.missing import missing_notes
from rl_training.records.table.series import LOGGED, MEASURED, Run, Source
from rl_training.records.table.trends import MIN_POINTS, constants, running_window, scaled
from rl_training.statistics.calibration import calibration

MAX_BARS = 80  # with more points, error bars would hide them
OFFSET = 0.14  # in steps; keeps the two error bars of a step apart
# Okabe and Ito's further colours, for reward functions.
FUNCTIONS = ("#E69F00", "#56B4E9", "#CC79A7", "#8C8C8C", "#B3A000")
HELD_OUT_LOOKS = ((ORANGE, "square"), (GREEN, "diamond"), (TEXT, "triangle"))


def draw_figures(run: Run) -> list[Chart]:
    """Return the charts of this run. A chart without data only says why."""
    figures = [_reward(run), _token_entropy(run), _entropy(run), _delta_h(run), *_calibration(run)]
    if len(run.rows("delta_h/part/momentum")):
        figures += [_causes(run), _layers(run)]
    if len(run.rows("bound/kl")):
        figures += [_declared(key, run) for key in ("bound", "bounded_rate")]
    if len(run.rows("gns/noise_scale_prompts")):
        figures.append(_noise_scale(run))
    if len(run.rows("covariance/token")):
        figures.append(_predictors(run))
    if len(run.rows("ess/advantage")):
        figures.append(_declared("ess", run))
    for evaluation in run.evaluations:
        pass_at = largest_pass_at(run.names(evaluation))
        for key in ("solved", "certain"):
            figures.append(_declared(key, run, evaluation, evaluation=evaluation.title, pass_at=pass_at))
    return figures


def points(label: str, rows: pd.DataFrame, color: str, mark: str, offset: float = 0.0) -> list[Series]:
    """Return values as points with error bars, or a great many as dots with their running mean."""
    finite_rows = finite(rows)
    if len(finite_rows) > MAX_BARS:
        return dots(finite_rows["value"], color, mark, label, label)
    return [Series.cloud(label, color, mark, finite_rows.index + offset, finite_rows)]


def dots(values: pd.Series[float], color: str, mark: str, label: str, mean: str) -> list[Series]:
    """Return values as dots and, if there are many, their running mean with the label `mean`."""
    window = running_window(len(values))
    smooth = len(values) >= 2 * window
    cloud = Series.cloud(label, color, mark, values.index, values, opacity=0.35 if smooth else 1)
    means = values.rolling(window, center=True).mean().dropna()
    return [cloud, Series(mean, color, means.index, means)] if smooth else [cloud]


def _declared(
    key: str,
    run: Run,
    source: Source = MEASURED,
    further: Sequence[Series] = (),
    without: Sequence[str] = (),
    **words: Any,
) -> Chart:
    """Return a chart whose series charts.yaml lists, as lines with bands.

    Args:
        source: Where the metrics come from, as in `Run.rows`.
        further: Series drawn first.
        without: Labels of series to leave out.
        words: Values for the templates of its texts.
    """
    chart = charts.load_chart(key, words)
    looks = chart["series"]
    quantities = {label: run.rows(look["metric"], source) for label, look in looks.items()}
    curves = [
        Series.of_rows(label, NAMED[look["color"]], quantities[label], look["mark"], dash=look.get("dash", ()))
        for label, look in looks.items()
        if label not in without and len(finite(quantities[label]))
    ]
    missing = missing_notes(quantities) if source == MEASURED else []
    is_share = curves and chart.get("is_share")
    ends = axis_limits(finite(pd.concat(quantities.values())), is_share=True) if is_share else None
    return draw(key, [*further, *curves] if curves else [], missing, ends=ends, **words)


def _reward(run: Run) -> Chart:
    rows = run.finite_rows("reward", LOGGED)
    held_out = held_out_rewards(run)
    if rows.empty:
        return draw("reward", [], ["reward – no finite value was logged"], window=0, held_out=held_out)
    window = running_window(len(rows))
    functions = reward_functions(run)
    series = dots(rows["value"], BLUE, "circle", "one step", f"mean of {window} steps")
    for (name, values), color in zip(functions.items(), cycle(FUNCTIONS)) if len(functions) > 1 else ():
        smooth = values.rolling(window, center=True).mean().dropna() if len(values) >= 2 * window else values
        series.append(Series(f"{name}", color, smooth.index, smooth))
    series += [
        Series.of_rows(f"held out: {evaluation}", color, rewards, mark)
        for (evaluation, rewards), (color, mark) in zip(held_out.items(), cycle(HELD_OUT_LOOKS))
    ]
    all_rows = pd.concat([rows, *held_out.values(), *(pd.DataFrame({"value": curve.y}) for curve in series[1:])])
    return draw("reward", series, ends=axis_limits(all_rows), window=window, held_out=held_out)


def _token_entropy(run: Run) -> Chart:
    """Return the chart of the level of entropy at each step."""
    levels = run.token_entropy()
    if levels.empty:
        return draw("token_entropy", [], ["entropy – no finite value was logged"])
    window = running_window(len(levels))
    series = dots(levels, TEXT, "circle", "one step", f"mean of {window} steps")
    return draw("token_entropy", series, ends=(0.0, 1.05 * float(levels.max()) or 1.0))


def _entropy(run: Run) -> Chart:
    sums = {kind: run.rows(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")}
    naive = naive_sums(run)
    curves = [
        Series.of_rows("measured", TEXT, sums["measured"], "circle"),
        Series.of_rows("predicted", BLUE, sums["predicted"], "square"),
        Series.of_rows("naive product (biased)", ORANGE, naive, "triangle", dash=(5, 3)),
    ]
    missing = missing_notes({**sums, "naive product": naive}, bands=False) + missing_notes(sums, values=False)
    series = [curve for curve in curves if len(curve.x) > 1]  # a single point is the initial 0
    starts = sum_starts(run)
    at_start = run.values("entropy/token").get(starts[0]) if len(starts) == 1 else None
    return draw("entropy", series, missing or [NO_LATER_BATCH] * (not series), start=at_start)


def _delta_h(run: Run) -> Chart:
    quantities = {name: run.rows(f"delta_h/{name}") for name in ("forward", "backward")}
    forward = by_about_step(quantities["forward"])
    backward = by_about_step(quantities["backward"])
    has_predictions = len(finite(forward)) or len(finite(backward))
    series = [
        *points("forward, from this step's batch", forward, BLUE, "circle", -OFFSET),
        *points("backward, from the next step's batch", backward, GREEN, "square", OFFSET),
        *points("true, on a separate buffer", run.rows("delta_h/true"), TEXT, "diamond"),
    ]
    return draw("delta_h", series if has_predictions else [], missing_notes(quantities))


def _calibration(run: Run) -> list[Chart]:
    """Return the chart of true against predicted (forward) changes of entropy; [] if none were measured."""
    forward = run.finite_rows("delta_h/forward")
    true = run.finite_rows("delta_h/true")
    steps = forward.index.intersection(true.index)
    if steps.empty:
        return []
    predictions = to_estimates(forward.loc[steps])
    truths = to_estimates(true.loc[steps])
    fit = calibration([(predictions[step], truths[step]) for step in steps])
    labels = {"slope_corrected": "slope, corrected for prediction noise", "coverage": "share within the error bars"}
    parts = [
        f"{label}: {format_estimate(fit[name])}" for name, label in labels.items() if math.isfinite(fit[name].value)
    ]
    cloud = Series.cloud("a step, with 95 % intervals", BLUE, "circle", forward.loc[steps], true.loc[steps])
    return [draw("calibration", [diagonal([cloud]), cloud], parts=parts)]


def _causes(run: Run) -> Chart:
    parts = {cause: run.values(f"delta_h/part/{cause}") for cause in ("momentum", "gradient", "decay")}
    nothing = [cause for cause, values in parts.items() if len(values) and not values.any()]
    total = run.values("delta_h/forward")
    whole = Series("forward, their sum", TEXT, total.index, total)
    return _declared("causes", run, further=[whole], without=nothing, nothing=nothing)


def _layers(run: Run) -> Chart:
    prefix = "delta_h/layer/"
    names = [name for name in run.names() if name.startswith(prefix) and not name.endswith("_sequence")]
    parts = {name.removeprefix(prefix): run.values(name) for name in names}
    labels = sorted(parts, key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label))
    missing = missing_notes({"layers": run.rows("delta_h/forward")}, bands=False)
    table = pd.DataFrame(parts).sort_index().T.reindex(labels)  # a row per layer, a column per step
    # A quantile rather than the maximum: Adam's first steps would leave all others colourless.
    sizes = table.abs().to_numpy(dtype=float).ravel()
    sizes = sizes[~np.isnan(sizes)]
    largest = (float(np.quantile(sizes, 0.9)) or float(sizes.max()) or 1.0) if len(sizes) else 1.0
    return heatmap("layers", table, largest, missing)


def _noise_scale(run: Run) -> Chart:
    rows = run.with_interval("gns/noise_scale_prompts")
    finite_rows = finite(rows).copy()
    missing = missing_notes({"noise scale": rows}, bands=bool(finite_rows["low"].isna().all()))
    if finite_rows.empty:
        return draw("noise_scale", [], missing)
    batch = finite_rows["value"] * run.rows("gns/batch_ratio")["value"].reindex(finite_rows.index)
    top = 1.5 * max(finite_rows["value"].iloc[len(finite_rows) // 4 :].max(), batch.max())
    finite_rows[["low", "high"]] = finite_rows[["low", "high"]].clip(upper=2 * top)  # a band may have an infinite end
    series = [
        Series.of_rows("noise scale, running average", BLUE, finite_rows, "circle"),
        Series("batch in use", TEXT, batch.index, batch, dash=(5, 3)),
    ]
    return draw("noise_scale", series, missing, ends=(0.0, top))


def _predictors(run: Run) -> Chart:
    """Return the chart of each step's delta_h/forward and −Cov(log π, A) against the measured change."""
    truth, source = _measured_changes(run)
    looks = {"forward": ("delta_h/forward", BLUE, "circle"),
             "−Cov(log π, A), scaled": ("covariance/token", ORANGE, "triangle")}  # fmt: skip
    clouds = list[Series]()
    missing = list[str]()
    for label, (metric, color, mark) in looks.items():
        predicted, true = run.values(metric).align(truth, join="inner")
        if len(predicted) >= MIN_POINTS:
            x = true.to_numpy()
            y = predicted.to_numpy()
            if same := constants({source: x, label: y}):
                missing += [f"{name} – the same at every step" for name in same]
                continue
            y = scaled(y, x) if "scaled" in label else y
            words = f"{label}: r = {np.corrcoef(x, y)[0, 1]:.2f}"
            clouds.append(Series.cloud(words, color, mark, MILLI * x, MILLI * y, opacity=0.7))
    if not clouds and not missing:
        missing = [f"fewer than {MIN_POINTS} steps have a prediction and a measured change"]
    series = [diagonal(clouds, "y = x"), *clouds] if clouds else []
    return draw("predictors", series, [*dict.fromkeys(missing)], source=source)


def _measured_changes(run: Run) -> tuple[pd.Series[float], str]:
    """Return the measured change of entropy by each step's update, and a text that says how it was measured."""
    true = run.values("delta_h/true")
    if len(true) >= MIN_POINTS:
        return true, "change on separate sequences"
    entropy = run.values("entropy/token")
    after = entropy.set_axis(entropy.index - 1)
    return (after - entropy).dropna(), "entropy of the next batch minus this one's"
