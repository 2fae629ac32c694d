"""The report's pictures, as PNG bytes: drawn on Figure objects, without a window or matplotlib's global state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from rl_training.report.series import NO_LATER_BATCH, Curve, Measurements, Run, curve, naive_of, why_it_ends

# Okabe and Ito's colours, which everyone can tell apart.
BLACK, BLUE, ORANGE, GREEN, GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#8C8C8C"
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "axes.xmargin": 0.02,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "savefig.facecolor": "white",  # legible on a dark page too
}
MAX_MARKERS = 20  # with more points than this a line needs no markers
MAX_BARS = 80  # with more points than this, error bars would hide them
OFFSET = 0.14  # of a step: keeps the two error bars of a step apart


@dataclass(frozen=True)
class Picture:
    """A drawn picture, with the words that belong beside it."""

    file: str
    title: str
    caption: str  # how to read it; empty when there is nothing to read
    missing: list[str]  # what is not in it, and why
    png: bytes


def draw_figures(run: Run) -> list[Picture]:
    """Returns the pictures of this run. What cannot be drawn leaves an empty frame that says why."""
    return [_reward(run), _entropy(run), _delta_h(run)]


def _reward(run: Run) -> Picture:
    reward = run.logged("reward")
    window = running_window(len(reward))
    missing = [] if reward else ["reward – no finite value was logged"]

    def draw(axes: Axes) -> None:
        _dots(axes, list(reward), list(reward.values()), BLUE, "o", "one step", f"mean of {window} steps")
        axes.set_ylabel("mean reward of a step's responses")
        _legend(axes)

    caption = (
        "Each dot is the mean reward of one step's responses. "
        f"The line, if the run is long enough for one, is the mean of the {window} logged steps around."
    )
    return _picture("reward.png", "Reward", caption, missing, draw if reward else None)


def _entropy(run: Run) -> Picture:
    measured, predicted = run.measured("delta_h/cumulative_measured"), run.measured("delta_h/cumulative_predicted")
    naive = naive_of(run)
    styles = {"measured": (BLACK, "o-"), "predicted": (BLUE, "s-"), "naive product (biased)": (ORANGE, "^--")}
    lines = dict(zip(styles, (curve(measured), curve(predicted), curve(naive)), strict=True))
    lines = {label: line for label, line in lines.items() if len(line.steps) > 1}  # the 0 they start from says nothing
    missing = _missing({"measured": measured, "predicted": predicted, "naive product": naive})
    if not lines and not missing:
        missing = [NO_LATER_BATCH]

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1)
        for label, line in lines.items():
            _line(axes, line, *styles[label], label)
        axes.set_ylabel("change of token entropy\nsince the first step (nats per token)")
        _legend(axes, Patch(color=GREY, alpha=0.4, lw=0, label="95 % interval"))

    caption = (
        "Blue, the predictions added up, should follow black, the token entropy of each step's batch minus that of the "
        "first, within the shaded 95 % intervals (Student-t, at each step). The dashed curve is what one gets when "
        "entropy gradient and update come from the same batch: their shared noise makes it drift away."
    )
    return _picture("entropy.png", "Entropy: predicted against measured", caption, missing, draw if lines else None)


def _delta_h(run: Run) -> Picture:
    quantities = {"forward": run.measured("delta_h/forward"), "backward": run.measured("delta_h/backward")}
    forward, backward = (curve(measurements, at_about_step=True) for measurements in quantities.values())

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1)
        _points(axes, forward, BLUE, "o", -OFFSET, "forward, from this step's batch")
        _points(axes, backward, GREEN, "s", OFFSET, "backward, from the next step's batch")
        axes.set_ylabel("predicted change of token entropy\nby this step's update (nats per token)")
        _legend(axes)

    caption = (
        "Two looks at the same update, both drawn at the step that makes it: from the batch that made it and from the "
        "first batch sampled after it, with 95 % intervals (in a long run, lines for running means). Their mean is the "
        "trapezoid that the predicted curve adds up; where they keep apart, forward alone is not to be trusted."
    )
    drawn = draw if forward.steps or backward.steps else None
    return _picture("delta_h.png", "Each update's effect on entropy", caption, _missing(quantities), drawn)


def _missing(quantities: Mapping[str, Measurements]) -> list[str]:
    """Returns why quantities are not in a picture, or not to its end: a line for each reason."""
    labels: dict[str, list[str]] = {}
    for label, measurements in quantities.items():
        labels.setdefault(why_it_ends(measurements), []).append(label)
    return [f"{', '.join(names)} – {reason}" for reason, names in labels.items() if reason]


def _line(axes: Axes, line: Curve, color: str, style: str, label: str) -> None:
    """Draws values as a line with a shaded band, where they have an error."""
    markers = 4 if len(line.steps) <= MAX_MARKERS else 0
    axes.plot(line.steps, line.values, style, color=color, lw=2, ms=markers, label=label)
    values, halves = np.array(line.values), np.array(line.half_widths)
    axes.fill_between(line.steps, values - halves, values + halves, color=color, alpha=0.16, lw=0)


def _points(axes: Axes, points: Curve, color: str, marker: str, offset: float, label: str) -> None:
    """Draws values as points with error bars; of very many points, the running mean. Nothing if there are none."""
    if len(points.steps) > MAX_BARS:
        _dots(axes, points.steps, points.values, color, marker, None, label)
    elif points.steps:
        x = np.array(points.steps) + offset
        axes.errorbar(x, points.values, points.half_widths, fmt=marker, color=color, ms=4, lw=1.2, label=label)


def _dots(
    axes: Axes, steps: Sequence[int], values: Sequence[float], color: str, marker: str, label: str | None, mean: str
) -> None:
    """Draws values as dots and, of many, their running mean, labelled `mean`."""
    window = running_window(len(values))
    smooth = len(values) >= 2 * window
    size, alpha = (4 if len(values) <= MAX_BARS else 2.5), (0.35 if smooth else 1)
    axes.plot(steps, values, marker, color=color, ms=size, alpha=alpha, mew=0, label=label)
    if smooth:
        means, half = np.convolve(values, np.full(window, 1 / window), mode="valid"), window // 2
        axes.plot(steps[half:-half], means, color=color, lw=2, label=mean, zorder=3)


def running_window(num_values: int) -> int:
    """Returns the odd number of values in a running mean: 5, in a long run about a twentieth of it."""
    return max(5, num_values // 20 // 2 * 2 + 1)


def _legend(axes: Axes, *more: Patch) -> None:
    """Sets the legend above the frame, where it hides no data."""
    handles = [*axes.get_legend_handles_labels()[0], *more]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), borderaxespad=0.3)


def _picture(file: str, title: str, caption: str, missing: list[str], draw: Callable[[Axes], None] | None) -> Picture:
    """Returns the picture that `draw` draws; without it, a small one that says what is missing, and no caption."""
    with matplotlib.style.context(["default", STYLE]):  # not the user's own style: dark on white, always
        figure = Figure(figsize=(8, 4 if draw else 1.2), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        if draw:
            draw(axes)
            axes.set_xlabel("optimizer step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            if np.ptp(axes.get_xlim()) < 1:  # a single step
                axes.set_xlim(np.mean(axes.get_xlim()) - 1, np.mean(axes.get_xlim()) + 1)
        else:
            axes.set_axis_off()
            words = "\n".join(textwrap.fill(textwrap.shorten(line, 300), 80) for line in missing)
            axes.text(0.5, 0.5, words, ha="center", va="center", color="#555555", parse_math=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return Picture(file, title, caption if draw else "", missing, buffer.getvalue())
