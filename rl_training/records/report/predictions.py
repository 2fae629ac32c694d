"""The charts of what will be and what was predicted: entropy's forecast, and predictions against the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.forecast import FEWEST, HORIZONS, EntropyForecast
from rl_training.records.report.charts import BLUE, GREY, ORANGE, TEXT, Axis, Chart, Series, draw
from rl_training.records.report.curves import dots
from rl_training.records.report.series import Run, changes_by_step
from rl_training.records.report.words import MILLI, in_words

FEWEST_TO_DRAW = 10  # measured steps; before that the ranges are too narrow
MIN_POINTS = 3  # of a correlation, or of a line whose slope is to mean something
AHEAD = 20  # of the alert: what can be told best


def forecast_of(run: Run) -> EntropyForecast | None:
    """Returns the forecast from the last measured step on; None with fewer than ten measured steps."""
    forecast, level, changes = EntropyForecast(), run.measured("entropy/token"), changes_by_step(run)
    for step, entropy in run.token_entropy().items():
        stderr = level[step].stderr if step in level else math.nan
        change = (changes[step].value, changes[step].stderr) if step in changes else (math.nan, math.nan)
        forecast.see(step, entropy, stderr, *change)
    return forecast if forecast.misses + 1 >= FEWEST_TO_DRAW else None


def alerts(run: Run) -> tuple[list[int], int, int] | None:
    """Returns the steps of the alerts, how many could be checked, and how many were right; None: alerts are off."""
    counts = {name: run.logged(f"forecast/alerts{name}") for name in ("", "_checked", "_right")}
    if not counts[""]:
        return None
    so_far = [(0, 0.0), *counts[""].items()]
    steps = [step for (_, before), (step, count) in pairwise(so_far) if count > before]
    checked, right = (int([*counts[name].values()][-1]) for name in ("_checked", "_right"))
    return steps, checked, right


def draw_forecast(run: Run) -> list[Chart]:
    """Returns the chart of entropy so far and of its ranges 10, 20 and 50 steps ahead; none of few steps."""
    forecast = forecast_of(run)
    if forecast is None:
        return []
    entropy = {step: value for step, value in run.token_entropy().items() if value > 0}
    ahead = {forecast.step + steps: forecast.ahead(steps) for steps in range(1, HORIZONS[-1] + 1)}
    lows, highs = ([a.range[end] for a in ahead.values()] for end in (0, 1))
    series = [
        *dots(list(entropy), list(entropy.values()), TEXT, "circle", "one step", "running mean"),
        Series("median ahead, 95 % range", BLUE, [*ahead], [a.median for a in ahead.values()], lows, highs),
    ]
    marks = {steps: forecast.ahead(steps) for steps in HORIZONS}
    places = [forecast.step + steps for steps in HORIZONS]
    lows, highs = ([a.range[end] for a in marks.values()] for end in (0, 1))
    at_marks = [a.median for a in marks.values()]
    named = f"in {', '.join(map(str, HORIZONS))} steps"
    series.append(Series(named, BLUE, places, at_marks, lows, highs, line=False, mark="circle", band=False))
    medians_ahead = "; ".join(
        f"{a.median:.2g} nats in {steps} steps, {a.range[0]:.2g} to {a.range[1]:.2g}" for steps, a in marks.items()
    )
    known = "its noise is learned from this run's one-step forecast errors"
    if forecast.misses < FEWEST:
        known = f"its noise is still mostly that of other runs ({forecast.misses} of {FEWEST} steps seen)"
    caption = (
        f"If training continues as it is: {medians_ahead} (median, 95 % range). The ranges are wide because entropy is "
        "hard to forecast: a rate is half forgotten after eight steps. The forecast follows log entropy and its rate; "
        f"{known}."
    )
    y = Axis("token entropy (nats), log scale", "log")
    return [draw("forecast", "Entropy, and where it may go", caption, [], series, y)]


def draw_calibration(run: Run) -> list[Chart]:
    """Returns the chart of each step's true change of entropy against forward; none where no truth was measured."""
    truth, forward = run.known("delta_h/true"), run.known("delta_h/forward")
    pairs = [(forward[step], true) for step, true in truth.items() if step in forward]
    if not pairs:
        return []
    names = {"slope_corrected": "slope, corrected for prediction noise", "coverage": "share within the error bars"}
    parts = []
    for name, label in names.items():
        for last in [*run.known(f"calibration/{name}").values()][-1:]:
            parts.append(f"{label}: {in_words(last)}")
    caption = (
        "Each point is a step at which the change of entropy was measured on sequences that training never sees. On "
        f"the grey line, prediction equals measurement. {'; '.join(parts).capitalize()}{'.' * bool(parts)}"
    )
    cloud = scatter("a step, with 95 % intervals", BLUE, "circle", pairs)
    x, y = Axis("forward (nats per token)"), Axis("true change, on a separate buffer")
    return [draw("calibration", "Predictions against the truth", caption, [], [diagonal([cloud]), cloud], y, x)]


def scatter(
    label: str, color: str, mark: str, pairs: Sequence[tuple[Estimate, Estimate]], times: float = 1.0
) -> Series:
    """Returns a cloud of (x, y) with both intervals, all times a factor."""
    both = [[(times * e.value, *(times * end for end in e.ends())) for e in side] for side in zip(*pairs, strict=True)]
    (x, left, right), (y, low, high) = (zip(*side, strict=True) for side in both)
    return Series(label, color, x, y, low, high, left, right, line=False, mark=mark, band=False)


def diagonal(clouds: Sequence[Series], label: str = "prediction = truth") -> Series:
    """Returns the line y = x across these clouds."""
    values = [value for cloud in clouds for value in (*cloud.x, *cloud.y)]
    ends = [min(values), max(values)]
    return Series(label, GREY, ends, ends, dash=(5, 3))


def draw_predictors(run: Run) -> Chart:
    """Returns the chart of delta_h/forward and −Cov(log π, A) of each step against the measured change."""
    truth, source = _measured_changes(run)
    predicted = {"forward": run.values("delta_h/forward"), "−Cov(log π, A), scaled": run.values("covariance/token")}
    clouds = []
    for (label, values), color, mark in zip(predicted.items(), (BLUE, ORANGE), ("circle", "triangle"), strict=True):
        steps = sorted(values.keys() & truth.keys())
        if len(steps) >= MIN_POINTS:
            x, y = (np.array([found[step] for step in steps]) for found in (truth, values))
            y = scaled(y, x) if "scaled" in label else y
            words = f"{label}: r = {np.corrcoef(x, y)[0, 1]:.2f}"
            clouds.append(Series(words, color, MILLI * x, MILLI * y, line=False, mark=mark, faint=0.7))
    caption = (
        "Each point is a step. The covariance of log-probability and advantage (Cui et al., arXiv 2505.22617) has no "
        "absolute scale: it is multiplied by the one factor that fits the line best. r is the correlation with the "
        "measured change; measurement noise lowers both."
    )
    missing = [] if clouds else [f"fewer than {MIN_POINTS} steps have a prediction and a measured change"]
    x_axis, y_axis = Axis(f"{source} (1e-3 nats per token)"), Axis("predicted (1e-3 nats per token)")
    shown = [diagonal(clouds, "y = x"), *clouds] if clouds else []
    return draw("predictors", "Predictors: forward and covariance", caption, missing, shown, y_axis, x_axis)


def scaled(values: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns the values times the factor of the least squares to the truth."""
    return values * (truth @ values) / (values @ values)


def _measured_changes(run: Run) -> tuple[dict[int, float], str]:
    """Returns the measured change by each step's update, and what it was measured on."""
    true = run.values("delta_h/true")
    if len(true) >= MIN_POINTS:
        return true, "change on separate sequences"
    entropy = run.values("entropy/token")
    changes = {step: entropy[after] - entropy[step] for step, after in pairwise(sorted(entropy)) if after == step + 1}
    return changes, "entropy of the next batch minus this one's"
