"""Positions for the labels of a chart's points, so that no two overlap on any screen."""

from __future__ import annotations

from collections.abc import Mapping

# In pixels:
PHONE_WIDTH = 250.0  # of a chart on a phone
LETTER_WIDTH = 7.0
LINE_HEIGHT = 14.0


def side(across: float) -> int:
    """Return 1 if a label stands to the right of its point, −1 if to the left, where there is more room."""
    return 1 if across <= 0.5 else -1


def label_offsets(points: Mapping[str, tuple[float, float]], height: float) -> dict[str, float]:
    """Return by how many pixels each label must move down (up if negative) so that no two overlap.

    A label takes the nearest free position, within the chart if there is one.

    Args:
        points: Position of each label by its text, as shares of the chart's width and height from the top left corner.
        height: Height of the chart in pixels. Its width is that on a phone; on wider screens labels are further apart.
    """
    placed: list[tuple[float, float, float]] = []  # left, right and middle of each label, in pixels
    offsets = {}
    for text, (across, down) in sorted(points.items(), key=lambda item: item[1][1]):
        point = PHONE_WIDTH * across
        middle = height * down
        left, right = sorted((point, point + side(across) * LETTER_WIDTH * len(text)))
        occupied = [other for start, end, other in placed if left < end and start < right]
        placed_at = _nearest(middle, occupied, height)
        placed.append((left, right, placed_at))
        offsets[text] = placed_at - middle
    return offsets


def _nearest(middle: float, occupied: list[float], height: float) -> float:
    """Return the height nearest to `middle` that is at least a line from all `occupied`, if possible in the chart."""
    places = [middle, *(other + side * LINE_HEIGHT for other in occupied for side in (-1, 1))]
    free = [place for place in places if all(abs(place - other) >= LINE_HEIGHT - 1e-9 for other in occupied)]
    within = [place for place in free if 0.5 * LINE_HEIGHT <= place <= height - 0.5 * LINE_HEIGHT or place == middle]
    return min(within or free, key=lambda place: abs(place - middle))
