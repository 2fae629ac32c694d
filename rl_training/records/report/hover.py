"""The tooltips of a picture's points, read from the drawn axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.ticker import FixedLocator

MOST_POINTS = 400  # of a curve: a page shows no more apart
BAND_OF = "_band of "  # begins the label of a shaded band, before the name of its curve


def hover_points(axes: Axes) -> list[list[Any]]:
    """Returns [across, down, words] for each labelled point that is drawn, placed in fractions of the picture.

    Curves, dots and error bars are read from the axes after the picture was drawn, so that no picture has to be
    described twice. A point with an error bar says both ends of it.
    """
    figure = axes.get_figure()
    assert figure is not None
    found: list[list[Any]] = []
    for label, x, y, ends in (*_of_lines(axes), *_of_bars(axes)):
        across, up = figure.transFigure.inverted().transform(axes.transData.transform((x, y)))
        found.append([round(float(across), 4), round(float(1 - up), 4), _words(axes, label, x, y, ends)])
    return found


def _of_lines(axes: Axes) -> Iterator[tuple[str, float, float, list[Any]]]:
    """Yields (label, x, y, the ends of each error bar) of the points of curves, dots and error bars."""
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
            yield "" if unnamed else label, x, y, [of[n] for of in segments] + band.get(float(x), [])


def _of_bars(axes: Axes) -> Iterator[tuple[str, float, float, list[Any]]]:
    for drawn in axes.containers:
        for bar in drawn if isinstance(drawn, BarContainer) else ():
            x, y = bar.get_x() + bar.get_width(), bar.get_y() + bar.get_height() / 2
            if math.isfinite(x):
                yield str(drawn.get_label()), x, y, []


def _band(axes: Axes, label: str) -> dict[float, list[Any]]:
    """Returns the two ends of the curve's shaded band at each x; empty where it has none."""
    ends: dict[float, list[float]] = {}
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and collection.get_label() == BAND_OF + label:
            for x, y in (vertex for path in collection.get_paths() for vertex in np.asarray(path.vertices)):
                ends.setdefault(float(x), []).append(float(y))
    return {x: [((x, min(ys)), (x, max(ys)))] for x, ys in ends.items()}


def _words(axes: Axes, label: str, x: float, y: float, bars: Sequence[Any]) -> str:
    """Returns what is said of a point: its name, where it is, and the ends of its error bars."""
    row = _tick_name(axes, y)
    title = ", ".join(part for part in (row, label) if part)
    across = f"step {round(x)}" if axes.get_xlabel() == "optimizer step" and not row else _with_ends(x, bars, 0)
    told = across if row else f"{across}, {_with_ends(y, bars, 1)}"
    return f"{title}: {told}" if title else told


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
