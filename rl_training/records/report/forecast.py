"""Where token entropy may go from the last step on: the forecast from a run's records, its fan, and its words."""

from __future__ import annotations

import math
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from rl_training.mathematics.forecast import FEWEST, HORIZONS, EntropyForecast
from rl_training.records.report.drawing import BLACK, BLUE, Picture, dots, legend, picture
from rl_training.records.report.series import Run

FEWEST_TO_DRAW = 10  # measured steps; before that the ranges are too narrow
AHEAD = 20  # of the sentence and of the alert: what can be told best


def forecast_of(run: Run) -> EntropyForecast | None:
    """Returns the forecast from the last measured step on; None with fewer than ten measured steps."""
    forecast, level, forward = EntropyForecast(), run.measured("entropy/token"), run.measured("delta_h/forward")
    for step, entropy in run.token_entropy().items():
        stderr = level[step].stderr if step in level else math.nan
        change = (forward[step].value, forward[step].stderr) if step in forward else (math.nan, math.nan)
        forecast.see(step, entropy, stderr, *change)
    return forecast if forecast.misses + 1 >= FEWEST_TO_DRAW else None


def in_twenty_steps(run: Run) -> str:
    """Returns the sentence of the report's opening; empty where there are too few steps."""
    forecast = forecast_of(run)
    if forecast is None:
        return ""
    ahead = forecast.ahead(AHEAD)
    low, high = ahead.range
    return f"In {AHEAD} more steps it would be {ahead.median:.2g} nats, 95 % range {low:.2g} to {high:.2g}."


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

    return [picture("forecast.png", "Entropy, and where it may go", _caption(forecast), [], draw)]


def _caption(forecast: EntropyForecast) -> str:
    every = ((steps, forecast.ahead(steps)) for steps in HORIZONS)
    told = "; ".join(f"{a.median:.2g} in {steps} steps, × or ÷ {a.range[1] / a.median:.2g}" for steps, a in every)
    known = (
        "its noise is learned from this run's one-step forecast errors"
        if forecast.misses >= FEWEST
        else f"its noise is still mostly that of other runs ({forecast.misses} of {FEWEST} steps seen)"
    )
    return (
        f"If training continues as it is: {told} (median, 95 % range). The ranges are wide because entropy is hard to "
        f"forecast: a rate is half forgotten after eight steps. The forecast follows log entropy and its rate; {known}."
    )
