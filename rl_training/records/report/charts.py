"""Charts as Vega-Lite, through Altair: what is drawn is a table, and one template of layers draws every table.

A chart's table has a row for each point: series, x, y, the ends of its 95 % interval (low and high; left and right of
x), and whether a line, a mark, a band or bars show it. A page draws it in the browser; PNG is drawn by vl-convert.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import altair as alt
import numpy as np

# Okabe and Ito's colours, which everyone can tell apart. TEXT is black on a light page and white on a dark one.
TEXT, BLUE, ORANGE, GREEN, GREY = "currentColor", "#0072B2", "#D55E00", "#009E73", "#8C8C8C"
STEP = "optimizer step"
WIDTH, HEIGHT = 640, 280
TITLE_LENGTH = 44  # of a line of an axis's title
MOST_POINTS = 400  # of a series: a page shows no more apart
DIGITS = 5  # of a number in a page
COLUMNS = ("x", "y", "low", "high", "left", "right")


Channel = TypeVar("Channel", alt.X, alt.Y)


@dataclass(frozen=True)
class Series:
    """A named curve or cloud of points.

    low, high    ends of the interval of y        left, right    those of x
    line, mark   whether points are joined, and marked (by its shape)
    band         whether intervals of y are a band, else bars
    dash         of the line: lengths of strokes and gaps        faint    0 hides it, 1 is full
    text         beside its points, which then need no legend
    """

    label: str
    color: str
    x: Sequence[Any] | np.ndarray
    y: Sequence[Any] | np.ndarray
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    left: Sequence[float] = ()
    right: Sequence[float] = ()
    line: bool = True
    mark: str = ""
    band: bool = True
    dash: tuple[int, ...] = ()
    faint: float = 1.0
    text: str = ""  # beside each point

    def columns(self) -> dict[str, list[Any]]:
        """Returns its points by column, None where there is no number, thinned to MOST_POINTS."""
        every = max(1, math.ceil(len(self.x) / MOST_POINTS))
        listed = {name: list(getattr(self, name))[::every] for name in COLUMNS}
        return {name: [_rounded(value) for value in values] for name, values in listed.items() if values}

    @property
    def styles(self) -> dict[str, Any]:
        """Its own of what the layers ask for."""
        return {
            "series": self.label, "line": self.line, "mark": self.mark, "band": self.band, "faint": self.faint,
            "text": self.text,
        }  # fmt: skip


def _rounded(value: Any) -> Any:
    if isinstance(value, str):
        return value
    number = float(value)
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


@dataclass(frozen=True)
class Axis:
    """An axis: its title, its scale ("linear", "log" or "names"), and its ends where they are set."""

    title: str
    scale: str = "linear"
    ends: tuple[float, float] | None = None
    names: Sequence[str] = ()
    base: int = 10  # of its logarithm

    def encoding(self, channel: type[Channel], field_name: str, **axis: Any) -> Channel:
        """Returns the encoding of a field along this axis; `axis` are further properties of Vega-Lite's."""
        labels = {"titleLimit": 0, "labelLimit": 260, **axis}
        title = textwrap.wrap(self.title, TITLE_LENGTH) or None
        if self.scale == "names":
            scale = alt.Scale(domain=list(self.names))
            return channel(f"{field_name}:N", title=title, sort=None, scale=scale, axis=alt.Axis(**labels))
        facts: dict[str, Any] = {"type": self.scale, "nice": self.ends is None and self.title != STEP}
        facts |= {"zero": False} | ({} if self.ends else {"padding": 8}) if self.scale == "linear" else {}
        facts |= {"domain": list(self.ends)} if self.ends else {}
        facts |= {"base": self.base} if self.scale == "log" else {}
        if self.title == STEP:
            labels |= {"tickMinStep": 1, "format": "d"}
        return channel(f"{field_name}:Q", title=title, scale=alt.Scale(**facts), axis=alt.Axis(**labels))


@dataclass(frozen=True)
class Chart:
    """A chart with the words that belong beside it."""

    name: str  # of its files
    title: str
    caption: str  # how to read it
    missing: list[str]  # what is not in it, and why
    series: list[Series] = field(default_factory=list)  # none where there is nothing to draw
    spec: Mapping[str, Any] = field(default_factory=dict)  # Vega-Lite, of data named `rows`
    over_steps: bool = False  # its x-axis is the optimizer step
    is_named: bool = False  # its y-axis names the series

    @property
    def data(self) -> list[dict[str, Any]]:
        """The table, a part for each series: its styles, and columns."""
        return [{"part": n, **one.styles, **one.columns()} for n, one in enumerate(self.series)]

    @property
    def legend(self) -> dict[str, Series]:
        """The series that can be hidden, by name: the first of each. None where an axis or a text names them."""
        found: dict[str, Series] = {}
        for one in self.series:
            if not one.text and not self.is_named:
                found.setdefault(one.label, one)
        return found

    def standalone(self) -> dict[str, Any]:
        """Returns Vega-Lite that holds its data, with a legend: for PNG, SVG and other programs."""
        rows = []
        for part in self.data:
            columns = {name: part.pop(name) for name in COLUMNS if name in part}
            rows += [part | dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        style = config(with_legend=bool(self.legend) or "config" in self.spec)  # that of cells is of their colours
        return {**self.spec, "datasets": {"rows": rows}, "width": WIDTH, "background": "white", "config": style}


def config(with_legend: bool) -> dict[str, Any]:
    """Returns the style of all charts."""
    words = {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    }
    legend = {**words, "title": None, "orient": "top", "columns": 3, "labelLimit": 300, "symbolType": "stroke"}
    return {
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {**words, "grid": True, "gridColor": "#8883", "domainColor": GREY, "tickColor": GREY},
        "legend": legend if with_legend else {"disable": True},
    }


def draw(
    name: str,
    title: str,
    caption: str,
    missing: Sequence[str],
    series: Sequence[Series],
    y: Axis,
    x: Axis = Axis(STEP),
    rules: Mapping[str, Sequence[float]] | None = None,
    second: alt.Chart | None = None,
    height: int = HEIGHT,
) -> Chart:
    """Returns the chart of these series; without a point in any, only what is missing.

    rules   straight lines across it: "y" and "x", their places
    second  a layer with a second axis of y
    """
    series = [one for one in series if len(one.x)]
    if not series:
        return Chart(name, title, "", list(missing))
    layers = [*_rules(rules or {}), *_layers(series, x, y)]
    chart = alt.layer(*layers)
    if second:  # nested, so that it has an axis of its own on the scale of the others
        chart = alt.layer(chart, second).resolve_axis(y="independent")
    chart = chart.add_params(alt.param(name="hidden", value=[]), alt.param(name="pointed", value=None))
    spec = to_spec(chart, height)
    is_named = set(y.names) == {one.label for one in series}
    return Chart(name, title, caption, list(missing), list(series), spec, x.title == STEP, is_named)


def to_spec(chart: alt.Chart | alt.LayerChart, height: int) -> dict[str, Any]:
    """Returns Vega-Lite of this height, with no style of its own."""
    with alt.data_transformers.enable(consolidate_datasets=False):
        spec = chart.to_dict(validate=False)
    kept = {name: part for name, part in spec.items() if name not in ("config", "$schema")}
    return {**kept, "height": height}


def _rules(rules: Mapping[str, Sequence[float]]) -> list[alt.Chart]:
    """Returns a layer for the straight lines along each axis."""
    return [
        alt.Chart(alt.InlineData([{"at": place} for place in places]))
        .mark_rule(color=GREY, strokeWidth=1)
        .encode(**{axis: alt.X("at:Q") if axis == "x" else alt.Y("at:Q")})
        for axis, places in rules.items()
        if len(places)
    ]


def _layers(series: Sequence[Series], x: Axis, y: Axis) -> list[alt.Chart]:
    """Returns the layers that draw a table: bands, lines, bars, marks, and what answers to the pointer."""
    names = list(dict.fromkeys(one.label for one in series))
    first = {one.label: one for one in reversed(series)}
    looks = alt.Scale(domain=names, range=[first[name].color for name in names])
    dashes = alt.Scale(domain=names, range=[list(first[name].dash) or [1, 0] for name in names])
    across, up = x.encoding(alt.X, "x"), y.encoding(alt.Y, "y")
    table = alt.Chart(alt.NamedData("rows")).transform_filter("indexof(hidden, datum.series) < 0")
    colored = table.encode(x=across, color=alt.Color("series:N", scale=looks, title=None), detail="part:N")
    ends = {"y": y.encoding(alt.Y, "low"), "y2": alt.Y2("high:Q")}
    opacity = alt.Opacity("faint:Q", scale=None, legend=None)
    layers = []
    if any(one.band and len(one.low) for one in series):
        shown = colored.transform_filter("datum.band && isValid(datum.low) && isValid(datum.high)")
        layers.append(shown.mark_area(fillOpacity=0.18, clip=True).encode(**ends))
    if any(one.line for one in series):
        stroke = alt.StrokeDash("series:N", scale=dashes, title=None)
        shown = colored.transform_filter("datum.line && isValid(datum.y)")
        layers.append(shown.mark_line(strokeWidth=2, clip=True).encode(y=up, strokeDash=stroke, opacity=opacity))
    if any(not one.band and len(one.low) for one in series):
        shown = colored.transform_filter("!datum.band && isValid(datum.low)")
        layers.append(shown.mark_rule(strokeWidth=1.2, clip=True).encode(**ends))
    if any(len(one.left) for one in series):
        bars = table.transform_filter("isValid(datum.left)").mark_rule(strokeWidth=1.2, clip=True)
        color = alt.Color("series:N", scale=looks)
        layers.append(bars.encode(x=x.encoding(alt.X, "left"), x2=alt.X2("right:Q"), y=up, color=color))
    if any(one.mark for one in series):
        shapes = alt.Shape("mark:N", scale=None, legend=None)
        shown = colored.transform_filter("datum.mark != ''").mark_point(filled=True, size=34, clip=True)
        layers.append(shown.encode(y=up, shape=shapes, opacity=opacity))
    if any(one.text for one in series):
        words = table.transform_filter("datum.text != ''").mark_text(align="left", dx=8, dy=-7, color=TEXT, fontSize=12)
        layers.append(words.encode(x=across, y=up, text="text:N"))
    return [*layers, *_pointed(table.transform_filter("isValid(datum.y)"), across, up, x, y)]


def _pointed(table: alt.Chart, across: alt.X, up: alt.Y, x: Axis, y: Axis) -> list[alt.Chart]:
    """Returns the layers that say the nearest point's numbers, and mark its step in every chart."""

    def with_ends(value: str, low: str, high: str) -> str:
        first, last, number = (f"format(datum.{end}, '.4~g')" for end in (low, high, value))
        ends = f"isValid(datum.{low}) ? ' (' + {first} + ' … ' + {last} + ')' : ''"
        return f"isNumber(datum.{value}) ? {number} + ({ends}) : datum.{value}"

    nearest = alt.selection_point(
        name="hover", on="pointerover", nearest=True, fields=["x"], empty=False, clear="pointerout"
    )
    zoomed: list[Literal["x", "y"]] = ["x"] if x.scale != "names" else []
    if y.scale != "names" and x.title != STEP:
        zoomed.append("y")
    zoom = alt.selection_interval(
        name="zoom", bind="scales", encodings=zoomed, zoom="wheel![event.shiftKey]",
        translate="[pointerdown[event.shiftKey], window:pointerup] > window:pointermove!",
    )  # fmt: skip
    at_x, at_y = with_ends("x", "left", "right"), with_ends("y", "low", "high")
    place = "'step ' + round(datum.x)" if x.title == STEP else f"({at_x})"
    words = table.transform_calculate(words=f"datum.series + ': ' + {place} + ', ' + ({at_y})")
    invisible = words.mark_point(opacity=0, size=90).encode(x=across, y=up, tooltip=alt.Tooltip("words:N"))
    dot = table.transform_filter(nearest).mark_point(color=TEXT, size=70, clip=True).encode(x=across, y=up)
    layers = [dot, invisible.add_params(nearest, zoom)]
    if x.title == STEP:
        cursor = alt.Chart(alt.InlineData([{}])).transform_filter("isValid(pointed)").transform_calculate(x="pointed")
        layers.insert(0, cursor.mark_rule(color=GREY, strokeWidth=1, clip=True).encode(x=across))
    return layers
