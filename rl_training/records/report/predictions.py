"""The pictures of what will be and what was predicted: entropy's forecast, and predictions against the truth."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from rl_training.mathematics.forecast import FEWEST, HORIZONS, EntropyForecast
from rl_training.records.report.drawing import BLACK, BLUE, GREY, ORANGE, Picture, dots, legend, picture
from rl_training.records.report.series import Run
from rl_training.records.report.words import MILLI, in_words

FEWEST_TO_DRAW = 10  # measured steps; before that the ranges are too narrow
MIN_POINTS = 3  # of a correlation, or of a line whose slope is to mean something
AHEAD = 20  # of the alert: what can be told best


def forecast_of(run: Run) -> EntropyForecast | None:
    """Returns the forecast from the last measured step on; None with fewer than ten measured steps."""
    forecast, level, forward = EntropyForecast(), run.measured("entropy/token"), run.measured("delta_h/forward")
    for step, entropy in run.token_entropy().items():
        stderr = level[step].stderr if step in level else math.nan
        change = (forward[step].value, forward[step].stderr) if step in forward else (math.nan, math.nan)
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


def draw_forecast(run: Run) -> list[Picture]:
    """Returns the picture of entropy so far and of its ranges 10, 20 and 50 steps ahead; none of few steps."""
    forecast = forecast_of(run)
    if forecast is None:
        return []
    entropy = {step: value for step, value in run.token_entropy().items() if value > 0}
    ahead = {forecast.step + steps: forecast.ahead(steps) for steps in range(1, HORIZONS[-1] + 1)}
    medians = [a.median for a in ahead.values()]
    lows, highs = ([a.range[end] for a in ahead.values()] for end in (0, 1))
    marked = [steps - 1 for steps in HORIZONS]

    def draw(axes: Axes) -> None:
        dots(axes, list(entropy), list(entropy.values()), BLACK, "o", "one step", "running mean")
        axes.fill_between([*ahead], lows, highs, color=BLUE, alpha=0.2, lw=0, label="95 % range ahead")
        axes.plot([*ahead], medians, color=BLUE, lw=2, label="median ahead", marker="o", markevery=marked)
        axes.vlines([[*ahead][i] for i in marked], [lows[i] for i in marked], [highs[i] for i in marked], color=BLUE)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("token entropy (nats), log scale")
        legend(axes)

    marks = {steps: forecast.ahead(steps) for steps in HORIZONS}
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
    return [picture("forecast.png", "Entropy, and where it may go", caption, [], draw)]


def draw_calibration(run: Run) -> list[Picture]:
    """Returns the picture of each step's true change of entropy against forward; none where no truth was measured."""
    truth, forward = run.known("delta_h/true"), run.known("delta_h/forward")
    pairs = [(forward[step], true) for step, true in truth.items() if step in forward]
    if not pairs:
        return []

    def draw(axes: Axes) -> None:
        x, y = ([e.value for e in estimates] for estimates in zip(*pairs, strict=True))
        half_x, half_y = ([e.half_width() for e in estimates] for estimates in zip(*pairs, strict=True))
        axes.axline((0, 0), slope=1, color=GREY, lw=1, label="prediction = truth")
        axes.errorbar(x, y, half_y, half_x, fmt="o", color=BLUE, ms=4, lw=1.2, label="a step, with 95 % intervals")
        axes.set_xlabel("forward (nats per token)")
        axes.set_ylabel("true change, on a separate buffer")
        legend(axes)

    names = {"slope_corrected": "slope, corrected for prediction noise", "coverage": "share within the error bars"}
    parts = []
    for name, label in names.items():
        for last in [*run.known(f"calibration/{name}").values()][-1:]:
            parts.append(f"{label}: {in_words(last)}")
    caption = (
        "Each point is a step at which the change of entropy was measured on sequences that training never sees. On "
        f"the grey line, prediction equals measurement. {'; '.join(parts).capitalize()}{'.' * bool(parts)}"
    )
    return [picture("calibration.png", "Predictions against the truth", caption, [], draw, over_steps=False)]


def draw_predictors(run: Run) -> Picture:
    """Returns the picture of delta_h/forward and −Cov(log π, A) of each step against the measured change."""
    truth, source = _measured_changes(run)
    predicted = {"forward": run.values("delta_h/forward"), "−Cov(log π, A), scaled": run.values("covariance/token")}
    drawn = {label: sorted(values.keys() & truth.keys()) for label, values in predicted.items()}

    def draw(axes: Axes) -> None:
        for (label, steps), color, marker in zip(drawn.items(), (BLUE, ORANGE), ("o", "^"), strict=True):
            if len(steps) >= MIN_POINTS:
                x, y = (np.array([values[step] for step in steps]) for values in (truth, predicted[label]))
                y = scaled(y, x) if "scaled" in label else y
                words = f"{label}: r = {np.corrcoef(x, y)[0, 1]:.2f}"
                axes.plot(MILLI * x, MILLI * y, marker, color=color, ms=5, alpha=0.7, mew=0, label=words)
        axes.axline((0, 0), slope=1, color=GREY, lw=1.2, ls="--")
        axes.set_xlabel(f"{source} (1e-3 nats per token)")
        axes.set_ylabel("predicted (1e-3 nats per token)")
        legend(axes)

    caption = (
        "Each point is a step. The covariance of log-probability and advantage (Cui et al., arXiv 2505.22617) has no "
        "absolute scale: it is multiplied by the one factor that fits the line best. r is the correlation with the "
        "measured change; measurement noise lowers both."
    )
    enough = any(len(steps) >= MIN_POINTS for steps in drawn.values())
    missing = [] if enough else [f"fewer than {MIN_POINTS} steps have a prediction and a measured change"]
    title = "Predictors: forward and covariance"
    return picture("predictors.png", title, caption, missing, draw if enough else None, over_steps=False)


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
