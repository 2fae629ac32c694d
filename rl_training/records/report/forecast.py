"""Where token entropy may go from the last step on: the forecast from a run's records, its fan, and its words."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from rl_training.mathematics.forecast import FEWEST, HORIZONS, EntropyForecast
from rl_training.records.report.drawing import BLACK, BLUE, Picture, dots, legend, picture
from rl_training.records.report.series import Run

FEWEST_TO_DRAW = 10  # measured steps; before that the ranges are too narrow
AHEAD = 20  # of the sentence and of the alert: what can be told best


def token_entropy(run: Run) -> dict[int, float]:
    """Returns token entropy by step, nats: as a probe measured it, else as the trainer logged it."""
    probed = {step: e.value for step, e in run.measured("entropy/token").items() if math.isfinite(e.value)}
    return probed or run.logged("entropy")


def forecast_of(run: Run) -> EntropyForecast | None:
    """Returns the forecast that stands at the last measured step; None where fewer than ten are measured."""
    forecast, level, forward = EntropyForecast(), run.measured("entropy/token"), run.measured("delta_h/forward")
    for step, entropy in token_entropy(run).items():
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
    """Returns the steps of the alerts, how many were held against what came, and how many were right; None: no alert."""
    counts = {name: run.logged(f"forecast/alerts{name}") for name in ("", "_checked", "_right")}
    if not counts[""]:
        return None
    before, steps = 0.0, []
    for step, count in counts[""].items():
        steps += [step] * (count > before)
        before = count
    return steps, *(int([*counts[name].values()][-1]) for name in ("_checked", "_right"))


def draw_forecast(run: Run) -> Picture:
    """Returns the picture of entropy so far and of its ranges 10, 20 and 50 steps ahead."""
    entropy = {step: value for step, value in token_entropy(run).items() if value > 0}
    forecast = forecast_of(run)

    def draw(axes: Axes) -> None:
        assert forecast is not None
        dots(axes, list(entropy), list(entropy.values()), BLACK, "o", "one step", "running mean")
        every = [forecast.ahead(steps) for steps in range(1, HORIZONS[-1] + 1)]
        steps = [forecast.step + steps for steps in range(1, HORIZONS[-1] + 1)]
        axes.fill_between(steps, *zip(*(a.range for a in every), strict=True), color=BLUE, alpha=0.2, lw=0,
                          label="95 % range ahead")  # fmt: skip
        axes.plot(steps, [a.median for a in every], color=BLUE, lw=2, label="median ahead")
        for horizon in HORIZONS:
            ahead, at = every[horizon - 1], forecast.step + horizon
            low, high = ahead.range
            axes.errorbar([at], [ahead.median], [[ahead.median - low], [high - ahead.median]], fmt="o", color=BLUE,
                          ms=5, lw=1.2, capsize=3)  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("token entropy (nats), log scale")
        legend(axes)

    why = f"the forecast – it needs {FEWEST_TO_DRAW} measured steps, of {len(entropy)} so far"
    missing = [] if forecast else [why]
    return picture("forecast.png", "Entropy, and where it may go", _caption(forecast), missing, forecast and draw)


def _caption(forecast: EntropyForecast | None) -> str:
    if forecast is None:
        return ""
    told = []
    for steps in HORIZONS:
        ahead = forecast.ahead(steps)
        factor = ahead.range[1] / ahead.median
        told.append(f"{ahead.median:.2g} in {steps} steps, × or ÷ {factor:.2g}")
    known = (
        "its noise is learned from how this run's values differed from what was foretold one step before"
        if forecast.misses >= FEWEST
        else f"its noise is still mostly that of other runs: {forecast.misses} of {FEWEST} steps are seen"
    )
    return (
        f"If training goes on as it is: {'; '.join(told)} (median, 95 % range). The ranges are as wide as entropy is "
        f"hard to foretell: a rate lasts about eight steps. The forecast follows log entropy and its rate; {known}."
    )
