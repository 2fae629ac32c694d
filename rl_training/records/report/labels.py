"""Where the labels of a chart's points stand, so that no two overlap on any screen."""

from __future__ import annotations

from collections.abc import Mapping

PHONE, LETTER, LINE_HEIGHT = 250.0, 7.0, 14.0  # pixels: a chart's width on a phone, and those of its text


def drops(points: Mapping[str, tuple[float, float]], height: float) -> dict[str, float]:
    """Return by how many pixels each label has to stand lower than its place, so that no two overlap.

    points  the places of the labels, by their texts, as shares of the chart's width and height from its top left corner
    height  of the chart, in pixels; its width is taken as that on a phone
    """
    placed: list[tuple[float, float, float]] = []  # left, right and middle of each label, in pixels
    lower = {}
    for text, (across, down) in sorted(points.items(), key=lambda item: item[1][1]):
        left, middle = PHONE * across, height * down
        right, drop = left + LETTER * len(text), 0.0
        for other_left, other_right, other in sorted(placed, key=lambda place: place[2]):
            if left < other_right and other_left < right and abs(middle + drop - other) < LINE_HEIGHT:
                drop = other + LINE_HEIGHT - middle
        placed.append((left, right, middle + drop))
        lower[text] = drop
    return lower
