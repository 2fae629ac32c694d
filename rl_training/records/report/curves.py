"""Curves over steps as series of a chart: lines with bands, points with bars, dots with their running mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rl_training.records.report.charts import Axis, Chart, Series, draw
from rl_training.records.report.series import Curve, Measurements, curve, finite, why_it_ends

MAX_MARKERS = 20  # with more points than this a line needs no markers
MAX_BARS = 80  # with more points than this, error bars would hide them
OFFSET = 0.14  # of a step: keeps the two error bars of a step apart


def line(label: str, drawn: Curve, color: str, mark: str = "circle", dash: tuple[int, ...] = ()) -> Series:
    """Returns values as a line with a shaded band, where they have an error."""
    few = mark if len(drawn.steps) <= MAX_MARKERS else ""
    return Series(label, color, drawn.steps, drawn.values, drawn.lows, drawn.highs, mark=few, dash=dash)


def points(label: str, drawn: Curve, color: str, mark: str, offset: float = 0.0) -> list[Series]:
    """Returns values as points with error bars; of very many points, the running mean."""
    if len(drawn.steps) > MAX_BARS:
        return dots(drawn.steps, drawn.values, color, mark, "", label)
    steps = [step + offset for step in drawn.steps]
    return [Series(label, color, steps, drawn.values, drawn.lows, drawn.highs, line=False, mark=mark, band=False)]


def dots(steps: Sequence[int], values: Sequence[float], color: str, mark: str, label: str, mean: str) -> list[Series]:
    """Returns values as dots and, of many, their running mean, labelled `mean`."""
    window = running_window(len(values))
    smooth = len(values) >= 2 * window
    cloud = Series(label or mean, color, steps, values, line=False, mark=mark, faint=0.35 if smooth else 1.0)
    if not smooth:
        return [cloud]
    means, half = np.convolve(values, np.full(window, 1 / window), mode="valid"), window // 2
    return [cloud, Series(mean, color, steps[half:-half], means.tolist())]


def running_window(num_values: int) -> int:
    """Returns the odd number of values in a running mean: 5, in a long run about a twentieth of it."""
    return max(5, num_values // 20 // 2 * 2 + 1)


def framed(series: Sequence[Series], least: float | None = None, most: float | None = None) -> tuple[float, float]:
    """Returns the ends of an axis that holds the values, and bands but not beyond `least` and `most`."""
    values = [value for one in series for value in one.y]
    lows = [end for one in series for end in one.low if math.isfinite(end)]
    highs = [end for one in series for end in one.high if math.isfinite(end)]
    low, high = min([*values, *lows]), max([*values, *highs])
    low = low if least is None else max(low, min(least, *values))
    high = high if most is None else min(high, max(most, *values))
    room = 0.03 * (high - low) or 0.5
    return low - room, high + room


def what_is_missing(quantities: Mapping[str, Measurements], values: bool = True, bands: bool = True) -> list[str]:
    """Returns a line for each reason why quantities are not in a chart, or not to its end, or have no error bar."""
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


def lines(
    name: str,
    title: str,
    caption: str,
    unit: str,
    quantities: Mapping[str, Measurements],
    looks: Sequence[tuple[str, str, tuple[int, ...]]],
    missing: Sequence[str] = (),
    further: Sequence[Series] = (),
    ends: tuple[float | None, float | None] | None = None,
    zero: bool = False,
) -> Chart:
    """Returns the chart of quantities by label over steps, a line with its band each, and further series.

    looks  of each: colour, mark, dash        ends  beyond which the frame follows values only        zero  a line there
    """
    drawn = [
        line(label, curve(measured), *look)
        for (label, measured), look in zip(quantities.items(), looks, strict=False)
        if finite(measured)
    ]
    y = Axis(unit, ends=framed(drawn, *ends) if ends and drawn else None)
    return draw(name, title, caption, missing, [*further, *drawn] if drawn else [], y, rules={"y": [0]} if zero else {})
