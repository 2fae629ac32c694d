"""How the report's pictures are drawn: on Figure objects, without a window or matplotlib's global state."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rl_training.records.report.series import Curve, Measurements, curve, finite, why_it_ends

# Okabe and Ito's colours, which everyone can tell apart.
BLACK, BLUE, ORANGE, GREEN, GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#8C8C8C"
STYLE = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "axes.xmargin": 0.02,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "savefig.facecolor": "white",  # legible on a dark page too
}
WIDTH = 7  # inches: 12-point text stays legible on a phone
CHARACTERS = 72  # of the legend's, in a line of this width
MAX_MARKERS = 20  # with more points than this a line needs no markers
MAX_BARS = 80  # with more points than this, error bars would hide them
MARGIN = 0.02  # of a frame beyond 0 and 1, for the line's own width
OFFSET = 0.14  # of a step: keeps the two error bars of a step apart

Draw = Callable[[Axes], object]


@dataclass(frozen=True)
class Picture:
    """A drawn picture, with the words that belong beside it."""

    file: str
    title: str
    caption: str  # how to read it
    missing: list[str]  # what is not in it, and why
    png: bytes  # none where there is nothing to draw
    hover: list[list[Any]]  # hover_points of it


def what_is_missing(quantities: Mapping[str, Measurements], values: bool = True, bands: bool = True) -> list[str]:
    """Returns a line for each reason why quantities are not in a picture, or not to its end, or have no error bar."""
    ends: dict[str, list[str]] = {}
    without: dict[str, list[tuple[str, int]]] = {}
    for label, measurements in quantities.items():
        ends.setdefault(why_it_ends(measurements), []).append(label)
        for step, estimate in finite(measurements).items():
            if math.isnan(estimate.stderr) and estimate.reason:
                without.setdefault(estimate.reason, []).append((label, step))
    lines = [f"{', '.join(labels)} – {reason}" for reason, labels in ends.items() if reason and values]
    for reason, found in without.items() if bands else ():
        labels, steps = (list(dict.fromkeys(column)) for column in zip(*found, strict=True))
        lines.append(f"error bars of {', '.join(labels)}, steps {min(steps)}–{max(steps)} – {reason}")
    return lines


def line(axes: Axes, drawn: Curve, color: str, style: str, label: str) -> None:
    """Draws values as a line with a shaded band, where they have an error."""
    markers = 4 if len(drawn.steps) <= MAX_MARKERS else 0
    axes.plot(drawn.steps, drawn.values, style, color=color, lw=2, ms=markers, label=label)
    axes.fill_between(drawn.steps, drawn.lows, drawn.highs, color=color, alpha=0.16, lw=0, label=BAND_OF + label)


def points(axes: Axes, drawn: Curve, color: str, marker: str, offset: float, label: str) -> None:
    """Draws values as points with error bars; of very many points, the running mean. Nothing if there are none."""
    if len(drawn.steps) > MAX_BARS:
        dots(axes, drawn.steps, drawn.values, color, marker, None, label)
    elif drawn.steps:
        x = np.array(drawn.steps) + offset
        bars = np.abs(np.array([drawn.lows, drawn.highs]) - drawn.values)
        axes.errorbar(x, drawn.values, bars, fmt=marker, color=color, ms=4, lw=1.2, label=label)


def dots(
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


def frame_shares(axes: Axes, values: Sequence[float]) -> None:
    """Limits the frame to 0 and 1 unless values lie beyond: only wide bands reach further."""
    least, most = axes.get_ylim()
    axes.set_ylim(max(least, min(0.0, *values) - MARGIN), min(most, max(1.0, *values) + MARGIN))


def running_window(num_values: int) -> int:
    """Returns the odd number of values in a running mean: 5, in a long run about a twentieth of it."""
    return max(5, num_values // 20 // 2 * 2 + 1)


def legend(axes: Axes) -> None:
    """Sets the legend above the frame, where it hides no data, in as many lines as its words need."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, CHARACTERS // (max(map(len, labels), default=1) + 6))
    names = [label.replace("$", r"\$") for label in labels]  # names are not math text
    axes.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(len(handles), columns) or 1,
                borderaxespad=0.3)  # fmt: skip


def picture(
    file: str,
    title: str,
    caption: str,
    missing: list[str],
    draw: Draw | None,
    height: float = 4,
    over_steps: bool = True,
) -> Picture:
    """Returns the picture that `draw` draws; without it, only what is missing.

    over_steps  the x-axis is the optimizer step; else it is what `draw` makes of it
    """
    if not draw:
        return Picture(file, title, "", missing, b"", [])
    with matplotlib.style.context(["default", STYLE]):  # not the user's own style: dark on white, always
        figure = Figure(figsize=(WIDTH, height), dpi=160, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        if over_steps:
            _count_steps(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    # After it was saved, since only then the frame's place in the picture is settled.
    return Picture(file, title, caption, missing, buffer.getvalue(), hover_points(axes))


def picture_of_lines(
    file: str,
    title: str,
    caption: str,
    unit: str,
    quantities: Mapping[str, Measurements],
    styles: Sequence[tuple[str, str]],
    around: Draw = lambda axes: None,
    missing: Sequence[str] = (),
) -> Picture:
    """Returns the picture of quantities by label over steps, a line with its band each, and what `around` adds."""
    lines = {label: curve(measurements) for label, measurements in quantities.items()}

    def draw(axes: Axes) -> None:
        for (label, drawn), style in zip(lines.items(), styles, strict=False):
            if drawn.steps:
                line(axes, drawn, *style, label)
        around(axes)
        axes.set_ylabel(unit)
        legend(axes)

    return picture(file, title, caption, [*missing], draw if any(drawn.steps for drawn in lines.values()) else None)


def _count_steps(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if np.ptp(axes.get_xlim()) < 1:  # a single step
        axes.set_xlim(np.mean(axes.get_xlim()) - 1, np.mean(axes.get_xlim()) + 1)


MOST_POINTS = 400  # of a curve: a page shows no more apart
BAND_OF = "_band of "  # begins the label of a shaded band, before the name of its curve


def hover_points(axes: Axes) -> list[list[Any]]:
    """Returns [across, down, words] for each labelled point that is drawn, placed in fractions of the picture.

    Read from the axes, so that no picture has to be described twice. A point says both ends of its error bar or band.
    """
    figure = axes.get_figure()
    assert figure is not None
    found: list[list[Any]] = []
    of_bars = {id(bars.lines[0]): bars for bars in axes.containers if isinstance(bars, ErrorbarContainer)}
    for line in axes.get_lines():
        bars = of_bars.get(id(line))
        label = str((bars or line).get_label())
        unnamed = label.startswith("_")
        if (unnamed and not bars) or line.get_transform() != axes.transData:  # axhline and axline are no data
            continue
        data = np.asarray(line.get_xydata(), dtype=float)
        places = np.flatnonzero(np.isfinite(data).all(axis=1))
        segments = [collection.get_segments() for collection in bars.lines[2]] if bars else []
        band = {} if bars else _band(axes, label)
        for n in places[:: max(1, math.ceil(len(places) / MOST_POINTS))]:
            x, y = data[n]
            across, up = figure.transFigure.inverted().transform(axes.transData.transform((x, y)))
            words = _words(axes, "" if unnamed else label, x, y, [of[n] for of in segments] + band.get(float(x), []))
            found.append([round(float(across), 4), round(float(1 - up), 4), words])
    return found


def _band(axes: Axes, label: str) -> dict[float, list[Any]]:
    """Returns the two ends of the curve's shaded band at each x; empty where it has none."""
    ends: dict[float, list[float]] = {}
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and collection.get_label() == BAND_OF + label:
            for x, y in (vertex for path in collection.get_paths() for vertex in np.asarray(path.vertices)):
                ends.setdefault(float(x), []).append(float(y))
    return {x: [((x, min(ys)), (x, max(ys)))] for x, ys in ends.items()}


def _words(axes: Axes, label: str, x: float, y: float, bars: Sequence[Any]) -> str:
    """Returns what is said of a point: its name, where it is (but not in which row), and its error bars' ends."""
    across = f"step {round(x)}" if axes.get_xlabel() == "optimizer step" else _with_ends(x, bars, 0)
    told = f"{across}, {_with_ends(y, bars, 1)}" if axes.get_ylabel() else across
    return f"{label}: {told}" if label else told


def _with_ends(value: float, bars: Sequence[Any], axis: int) -> str:
    for ends in bars:  # empty where the bar is not known
        low, high = sorted(float(end[axis]) for end in ends) if len(ends) else (value, value)
        if high > low:
            return f"{value:.4g} ({low:.4g} … {high:.4g})"
    return f"{value:.4g}"
