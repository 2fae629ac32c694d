"""Labels of a chart's points do not overlap on a phone or a wide screen, and stay inside the chart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rl_training.records.pages.labels import LETTER_WIDTH, LINE_HEIGHT, PHONE_WIDTH, label_offsets, side

HEIGHT = 360.0


def boxes(points: dict[str, tuple[float, float]], width: float) -> list[tuple[float, float, float]]:
    """Return each label's left end, right end and vertical middle on a chart of this width, in pixels."""
    offsets = label_offsets(points, HEIGHT)
    return [
        (
            *sorted((width * across, width * across + side(across) * LETTER_WIDTH * len(text))),
            HEIGHT * down + offsets[text],
        )
        for text, (across, down) in points.items()
    ]


@pytest.mark.parametrize("width", [PHONE_WIDTH, 440.0])
@pytest.mark.parametrize("spread", [0.0, 0.02, 1.0])
def test_labels_neither_overlap_nor_leave_the_chart(width: float, spread: float) -> None:
    """Ten points at the bottom, like small effects next to a large one: at the same place, close, or far apart."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        places = np.array([0.5, 0.97]) + spread * (generator.random((10, 2)) - [0.5, 0.97])
        points = {f"{'name' * (1 + n % 3)}{n}": (float(x), float(y)) for n, (x, y) in enumerate(places)}
        drawn = boxes(points, width)
        for (left, right, middle), (other_left, other_right, other) in itertools.combinations(drawn, 2):
            apart = right <= other_left or other_right <= left or abs(middle - other) >= LINE_HEIGHT - 1e-6
            assert apart
        assert all(0.0 <= middle <= HEIGHT and left >= 0.0 and right <= width for left, right, middle in drawn)


def test_a_label_without_neighbours_stays_beside_its_point() -> None:
    assert label_offsets({"psr": (0.2, 0.1), "lr": (0.8, 0.9)}, HEIGHT) == {"psr": 0.0, "lr": 0.0}
