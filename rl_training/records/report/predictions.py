"""The pictures of predictions against the truth, a point for each step."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from rl_training.records.report.drawing import BLUE, GREY, ORANGE, Picture, legend, picture
from rl_training.records.report.series import Run
from rl_training.records.report.summary import MILLI

MIN_POINTS = 3  # of a correlation, or of a line whose slope is to mean something


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
    told = []
    for name, label in names.items():
        for last in [*run.known(f"calibration/{name}").values()][-1:]:
            error = "" if math.isnan(last.stderr) else f" ± {last.stderr:.2f}"
            told.append(f"{label}: {last.value:.2f}{error}")
    caption = (
        "Each point is a step at which the change of entropy was measured on sequences that training never sees. On "
        f"the grey line, prediction equals measurement. {'; '.join(told).capitalize()}{'.' * bool(told)}"
    )
    return [picture("calibration.png", "Predictions against the truth", caption, [], draw, over_steps=False)]


def draw_predictors(run: Run) -> Picture:
    """Returns the picture of delta_h/forward and −Cov(log π, A) of each step against the measured change."""
    truth, source = _measured_changes(run)
    predicted = {"forward": _values(run, "delta_h/forward"), "−Cov(log π, A), scaled": _values(run, "covariance/token")}
    drawn = {label: sorted(values.keys() & truth.keys()) for label, values in predicted.items()}

    def draw(axes: Axes) -> None:
        for (label, steps), color, marker in zip(drawn.items(), (BLUE, ORANGE), ("o", "^"), strict=True):
            if len(steps) >= MIN_POINTS:
                x, y = (np.array([of[step] for step in steps]) for of in (truth, predicted[label]))
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
    true = _values(run, "delta_h/true")
    if len(true) >= MIN_POINTS:
        return true, "change on separate sequences"
    entropy = _values(run, "entropy/token")
    changes = {step: entropy[after] - entropy[step] for step, after in pairwise(sorted(entropy)) if after == step + 1}
    return changes, "entropy of the next batch minus this one's"


def _values(run: Run, name: str) -> dict[int, float]:
    return {step: estimate.value for step, estimate in run.known(name).items()}
