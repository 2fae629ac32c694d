"""A chart and its curves as data, and the section of a page that holds them.

A page draws them in the browser; vl-convert draws them as PNG or SVG. Both draw templates/vega.yaml (layers);
templates/charts.yaml has the texts. drawing.py makes charts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import yaml

from rl_training.records.pages.environment import ENVIRONMENT

# Okabe and Ito's colours, safe for colour-blind readers. TEXT is black on a light page and white on a dark one.
TEXT = "currentColor"
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
GREY = "#8C8C8C"
NAMED = {"text": TEXT, "blue": BLUE, "orange": ORANGE, "green": GREEN, "grey": GREY}  # names in charts.yaml
WIDTH = 640  # pixels
HEIGHT = 280
MAX_MARKS = 20  # a line with more points has no marks
MAX_POINTS = 400  # per series: a page cannot show more
DIGITS = 5  # significant digits of a number in a page
SERIES_COLUMNS = ("x", "y", "low", "high", "left", "right", "base")
SERIES_STYLES = ("line", "mark", "band", "opacity", "text", "text_offset", "text_side")
Column: TypeAlias = "Sequence[Any] | np.ndarray | pd.Series[Any] | pd.Index[Any]"


def read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def template(name: str) -> Any:
    """Return the content of a file in templates/ that is not a Jinja template."""
    return read_yaml((files(__package__) / "templates" / name).read_text(encoding="utf-8"))


def load_chart(key: str, words: Mapping[str, Any]) -> Any:
    """Return a chart's entry in charts.yaml, with its Jinja texts filled in with `words` and put on one line."""

    def render(node: Any) -> Any:
        if isinstance(node, str) and "{" in node:
            return " ".join(ENVIRONMENT.from_string(node).render(words).split())
        if isinstance(node, dict):
            return {render(name): render(inner) for name, inner in node.items()}
        return [render(inner) for inner in node] if isinstance(node, list) else node

    return render(template("charts.yaml")[key])


@dataclass(frozen=True)
class Series:
    """A named curve or cloud of points.

    Args:
        low, high: Ends of the interval of y; left, right: those of x.
        base: Where horizontal bars begin that end at x.
        line: Whether points are joined.
        mark: Shape of the points; "" for none.
        band: Whether intervals of y are drawn as a band; otherwise as bars.
        dash: Lengths of the line's strokes and gaps.
        opacity: From 0 (hidden) to 1.
        text: Text next to each point, instead of an entry in the legend.
        text_offset: Pixels by which the text is moved down.
        text_side: 1 if the text stands to the right of the point, −1 if to the left.
    """

    label: str
    color: str
    x: Column
    y: Column
    low: Column = ()
    high: Column = ()
    left: Column = ()
    right: Column = ()
    base: Column = ()
    line: bool = True
    mark: str = ""
    band: bool = True
    dash: Sequence[int] = ()
    opacity: float = 1.0
    text: str = ""
    text_offset: float = 0.0
    text_side: int = 1

    @classmethod
    def of_rows(cls, label: str, color: str, rows: pd.DataFrame, mark: str = "", **style: Any) -> Series:
        """Return a metric's finite values as a line over steps, with a band if they have errors."""
        finite_rows = rows[np.isfinite(rows["value"])]
        mark = mark if len(finite_rows) <= MAX_MARKS else ""
        return cls(
            label,
            color,
            x=finite_rows.index,
            y=finite_rows["value"],
            low=finite_rows["low"],
            high=finite_rows["high"],
            mark=mark,
            **style,
        )

    @classmethod
    def cloud(cls, label: str, color: str, mark: str, x: Any, y: Any, times: float = 1.0, **style: Any) -> Series:
        """Return points with error bars.

        Args:
            x, y: Rows of a metric, whose values and intervals are drawn; or plain positions.
            times: Factor on the values and intervals of rows.
        """
        columns: dict[str, Any] = {}
        for place, rows, ends in (("x", x, ("left", "right")), ("y", y, ("low", "high"))):
            if isinstance(rows, pd.DataFrame):
                names = dict(zip(("value", "low", "high"), (place, *ends), strict=True))
                columns |= {name: times * rows[column] for column, name in names.items()}
            else:
                columns[place] = rows
        return cls(label, color, **columns, line=False, mark=mark, band=False, **style)

    @property
    def heights(self) -> Iterator[Any]:
        """All values of y, and the ends of their intervals."""
        return itertools.chain(self.y, self.low, self.high)

    def _places_drawn(self) -> Sequence[int]:
        """Return the positions of the points that are drawn, at most MAX_POINTS of them.

        Of a line, each stretch keeps its lowest and its highest point, so that no spike is lost.
        """
        number = len(self.x)
        if number <= MAX_POINTS:
            return range(number)
        if not self.line:
            return range(0, number, math.ceil(number / MAX_POINTS))
        y = np.asarray(self.y, dtype=float)
        places = {0, number - 1}
        for start, end in itertools.pairwise(np.linspace(0, number, MAX_POINTS // 2, dtype=int).tolist()):
            finite = start + np.flatnonzero(np.isfinite(y[start:end]))
            extremes = {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])} if len(finite) else {start}
            places |= extremes
        return sorted(places)

    @property
    def left_out(self) -> str:
        """Which points are not drawn, in words; "" if all are."""
        if len(self.x) <= MAX_POINTS:
            return ""
        selection = "the lowest and the highest of each stretch are drawn" if self.line else "only some are drawn"
        return f"single points: where there are over {MAX_POINTS}, {selection}"

    def to_record(self, series_number: int) -> dict[str, Any]:
        """Return the style of the series, and by column the points that are drawn."""
        places = self._places_drawn()
        columns = {}
        for name in SERIES_COLUMNS:
            values = list(getattr(self, name))
            columns[name] = [_rounded(values[place]) for place in places] if values else []
        styles = {name: getattr(self, name) for name in SERIES_STYLES}
        return {"part": series_number, "series": self.label, **styles, **{k: v for k, v in columns.items() if v}}


def _rounded(value: Any) -> Any:
    """Return a number with DIGITS digits, None if it is not finite; a name unchanged."""
    if isinstance(value, str):
        return value
    number = float(value)
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


@dataclass(frozen=True)
class Chart:
    """A chart with the texts next to it."""

    name: str  # of its picture files
    title: str
    caption: str  # how to read it
    missing: list[str]  # what the chart lacks, and why
    series: list[Series] = field(default_factory=list)  # empty if there is nothing to draw
    facts: Mapping[str, Any] = field(default_factory=dict)  # values for the template vega.yaml

    @functools.cached_property
    def data(self) -> list[dict[str, Any]]:
        """The points and styles, one part per series."""
        return [curve.to_record(number) for number, curve in enumerate(self.series)]

    @functools.cached_property
    def spec(self) -> dict[str, Any]:
        """Vega-Lite for a page, which adds the data under the name `rows`."""
        return self._vega_lite(in_page=True)

    def _vega_lite(self, in_page: bool) -> dict[str, Any]:
        legend = {"values": [*self.legend]} if self.legend and not in_page else None
        template = ENVIRONMENT.get_template("vega.yaml")
        return read_yaml(template.render(**self.facts, parts=self.data, legend=legend, in_page=in_page))

    @property
    def legend(self) -> dict[str, Series]:
        """The first series of each name, to be shown or hidden; {} if the axis names them. Texts need no entry."""
        return {} if self.facts["is_named"] else first_by_label([curve for curve in self.series if not curve.text])

    def standalone(self) -> dict[str, Any]:
        """Return Vega-Lite with data and legend, for PNG, SVG and other programs."""
        rows = [
            {name: value[number] if isinstance(value, list) else value for name, value in record.items()}
            for record in self.data
            for number in range(len(record["x"]))
        ]
        facts = {"datasets": {"rows": rows}, "width": WIDTH, "background": "white", "config": template("style.yaml")}
        return self._vega_lite(in_page=False) | facts


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    name: str
    sentences: list[str]
    table: list[list[str]]  # its first row is headings
    charts: list[Chart]
    commands: Sequence[str] = ()  # that train with the recommendations


def first_by_label(series: Sequence[Series]) -> dict[str, Series]:
    """Return the first series with each label."""
    labels = [curve.label for curve in series]
    return {label: series[labels.index(label)] for label in labels}
