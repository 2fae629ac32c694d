"""A chart's curves as a plain SVG, which a page shows at once, until its scripts have drawn the chart in its place."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from rl_training.records.pages.charts import WIDTH, Chart

# Pixels around the curves, as Vega leaves them for axes:
LEFT = 48
RIGHT = 8
TOP = 6
BOTTOM = 42


def preview(chart: Chart) -> Markup:
    """Return the lines and points of a chart over steps, in its colours and at their places, without axes."""
    records = [record for record in chart.data if record.get("x")]
    points = [(x, y) for record in records for x, y in zip(record["x"], record["y"], strict=True) if y is not None]
    if not points:
        return Markup("")
    steps = [x for x, _ in points]
    low, high = chart.facts["y"]["scale"].get("domain") or (min(y for _, y in points), max(y for _, y in points))
    first = min(steps)
    last = max(steps)
    height = chart.spec["height"]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1.0)
        up = (min(max(y, low), high) - low) / ((high - low) or 1.0)
        return round(WIDTH * across, 1), round(height * (1 - up), 1)

    curves = Markup("").join(_curve(record, place, chart.legend[record["series"]].color) for record in records)
    frame = Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true" style="display: block; '
        'overflow: visible; width: calc(100% - {}px); height: {}px; margin: {}px {}px {}px {}px">{}</svg>'
    )
    return frame.format(WIDTH, height, LEFT + RIGHT, height, TOP, RIGHT, BOTTOM, LEFT, curves)


def _curve(record: dict[str, Any], place: Any, color: str) -> Markup:
    """Return a curve as a line, or as dots: lines of no length with round ends, which stretching leaves round."""
    places = [place(x, y) for x, y in zip(record["x"], record["y"], strict=True) if y is not None]
    dots = "".join(f"M{x} {y}h0" for x, y in places)
    line = f"M{' '.join(f'{x} {y}' for x, y in places)}"
    path = Markup('<path d="{}" fill="none" stroke="{}" stroke-width="{}" stroke-opacity="{}" stroke-linecap="round" '
                  'vector-effect="non-scaling-stroke"/>')  # fmt: skip
    return path.format(line if record["line"] else dots, color, 2 if record["line"] else 6, record["opacity"])
