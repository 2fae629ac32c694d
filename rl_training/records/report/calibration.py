"""The picture of predictions against the truth, where the probe `ground_truth` measured it."""

from __future__ import annotations

import math

from matplotlib.axes import Axes

from rl_training.records.report.drawing import BLUE, GREY, Picture, legend, picture
from rl_training.records.report.series import Run


def draw_calibration(run: Run) -> list[Picture]:
    """Returns the picture of each step's true change of entropy against forward; none where no truth was measured."""
    truth, forward = run.known("delta_h/true"), run.known("delta_h/forward")
    pairs = [(forward[step], true) for step, true in truth.items() if step in forward]
    if not pairs:
        return []

    def draw(axes: Axes) -> None:
        x, y = [p.value for p, _ in pairs], [t.value for _, t in pairs]
        half_x, half_y = [p.half_width() for p, _ in pairs], [t.half_width() for _, t in pairs]
        axes.axline((0, 0), slope=1, color=GREY, lw=1, label="prediction = truth")
        axes.errorbar(x, y, half_y, half_x, fmt="o", color=BLUE, ms=4, lw=1.2, label="a step, with 95 % intervals")
        axes.set_xlabel("forward (nats per token)")
        axes.set_ylabel("true change, on a separate buffer")
        legend(axes)

    caption = (
        "Each point is a step at which the change of entropy was measured on sequences that training never sees. On "
        f"the grey line, prediction equals measurement. {_in_figures(run)}"
    )
    return [picture("calibration.png", "Predictions against the truth", caption, [], draw, over_steps=False)]


def _in_figures(run: Run) -> str:
    names = {"slope_corrected": "slope, corrected for prediction noise", "coverage": "share within the error bars"}
    told = []
    for name, label in names.items():
        for last in [*run.known(f"calibration/{name}").values()][-1:]:
            error = "" if math.isnan(last.stderr) else f" ± {last.stderr:.2f}"
            told.append(f"{label}: {last.value:.2f}{error}")
    return "; ".join(told).capitalize() + "." if told else ""
