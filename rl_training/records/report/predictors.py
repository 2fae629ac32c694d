"""Two predictors of the entropy's change against what was measured: this package's forward, and a covariance."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from rl_training.records.report.drawing import BLUE, GREY, ORANGE, Picture, legend, picture
from rl_training.records.report.series import Measurements, Run
from rl_training.records.report.summary import MILLI

MIN_POINTS = 3


def draw_predictors(run: Run) -> Picture:
    """Returns the picture of delta_h/forward and −Cov(log π, A) of each step against the measured change."""
    truth, source = _measured_changes(run)
    predicted = {
        "forward": _values(run.measured("delta_h/forward")),
        "−Cov(log π, A), scaled": _values(run.measured("covariance/token")),
    }
    drawn = {label: sorted(values.keys() & truth.keys()) for label, values in predicted.items()}

    def draw(axes: Axes) -> None:
        for (label, steps), color, marker in zip(drawn.items(), (BLUE, ORANGE), ("o", "^"), strict=True):
            if len(steps) < MIN_POINTS:
                continue
            x, y = (np.array([of[step] for step in steps]) for of in (truth, predicted[label]))
            if "scaled" in label:
                y = y * (x @ y) / (y @ y)
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


def _measured_changes(run: Run) -> tuple[dict[int, float], str]:
    """Returns the measured change by each step's update, and what it was measured on."""
    true = _values(run.measured("delta_h/true"))
    if len(true) >= MIN_POINTS:
        return true, "change on separate sequences"
    entropy = _values(run.measured("entropy/token"))
    changes = {step: entropy[after] - entropy[step] for step, after in pairwise(sorted(entropy)) if after == step + 1}
    return changes, "entropy of the next batch minus this one's"


def _values(measurements: Measurements) -> dict[int, float]:
    return {step: estimate.value for step, estimate in measurements.items() if math.isfinite(estimate.value)}
