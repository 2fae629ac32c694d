"""The tooltips of a picture's points, read from the drawn axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

MOST_POINTS = 400  # of a curve: a page shows no more apart
BAND_OF = "_band of "  # begins the label of a shaded band, before the name of its curve


def hover_points(axes: Axes) -> list[list[Any]]:
    """Returns [across, down, words] for each labelled point that is drawn, placed in fractions of the picture.

    Curves, dots and error bars are read from the axes after the picture was drawn, so that no picture has to be
    described twice. A point with an error bar says both ends of it.
    """
    found: list[list[Any]] = []
    of_bars = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    inside = {id(container.lines[0]): container for container in of_bars}
    for line in axes.get_lines():
        container = inside.get(id(line))
        label = str(container.get_label() if container else line.get_label())
        if not label.startswith("_") or container:
            found += _points(axes, line, "" if label.startswith("_") else label, container)
    for drawn in axes.containers:
        if isinstance(drawn, BarContainer):
            label = str(drawn.get_label())
            ends = [(bar.get_x() + bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in drawn]
            found += [_placed(axes, x, y, _words(axes, label, x, y, [])) for x, y in ends if math.isfinite(x)]
    return found


def _points(axes: Axes, line: Line2D, label: str, container: ErrorbarContainer | None) -> list[list[Any]]:
    if line.get_transform() != axes.transData:  # axhline and axline are no data
        return []
    data = np.asarray(line.get_xydata(), dtype=float)
    places = np.flatnonzero(np.isfinite(data).all(axis=1))
    bars = [collection.get_segments() for collection in container.lines[2]] if container else []
    band = {} if container else _band(axes, label)
    found = []
    for n in places[:: max(1, math.ceil(len(places) / MOST_POINTS))]:
        x, y = data[n]
        ends = [segments[n] for segments in bars] + band.get(float(x), [])
        found.append(_placed(axes, x, y, _words(axes, label, x, y, ends)))
    return found


def _band(axes: Axes, label: str) -> dict[float, list[Any]]:
    """Returns the two ends of the curve's shaded band at each x; empty where it has none."""
    ends: dict[float, list[float]] = {}
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and collection.get_label() == BAND_OF + label:
            for path in collection.get_paths():
                for x, y in np.asarray(path.vertices):
                    ends.setdefault(float(x), []).append(float(y))
    return {x: [((x, min(ys)), (x, max(ys)))] for x, ys in ends.items()}


def _placed(axes: Axes, x: float, y: float, words: str) -> list[Any]:
    figure = axes.get_figure()
    assert figure is not None
    across, up = figure.transFigure.inverted().transform(axes.transData.transform((x, y)))
    return [round(float(across), 4), round(float(1 - up), 4), words]


def _words(axes: Axes, label: str, x: float, y: float, bars: Sequence[Any]) -> str:
    """Returns what is said of a point: its name, where it is, and the ends of its error bars."""
    named = _tick_name(axes, y)
    title = ", ".join(part for part in (named, label) if part)
    values = [_with_ends(x, bars, 0)]
    if not named:
        values = [_with_ends(x, bars, 0), _with_ends(y, bars, 1)]
        if axes.get_xlabel() == "optimizer step":
            values[0] = f"step {round(x)}"
    return f"{title}: {', '.join(values)}" if title else ", ".join(values)


def _with_ends(value: float, bars: Sequence[Any], axis: int) -> str:
    for ends in bars:  # empty where the bar is not known
        low, high = sorted(float(end[axis]) for end in ends) if len(ends) else (value, value)
        if high > low:
            return f"{value:.4g} ({low:.4g} … {high:.4g})"
    return f"{value:.4g}"


def _tick_name(axes: Axes, y: float) -> str:
    """Returns the name of the row at this height, where the rows of a picture have names."""
    if not isinstance(axes.yaxis.get_major_locator(), FixedLocator):
        return ""
    ticks = axes.get_yticks()
    nearest = int(np.abs(ticks - y).argmin())
    name = axes.get_yticklabels()[nearest].get_text()
    return name if abs(ticks[nearest] - y) < 0.5 and any(letter.isalpha() for letter in name) else ""
