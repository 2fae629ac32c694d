"""A chart of a long run has few points, and yet every one that stands out."""

from __future__ import annotations

import pytest

from rl_training.records.pages.charts import BLUE, MAX_POINTS, Series
from rl_training.records.pages.drawing import draw


@pytest.mark.parametrize("place", [0, 1, 499, 500, 999])
@pytest.mark.parametrize("spike", [-9.0, 9.0])
def test_a_long_line_keeps_its_spikes_and_its_last_point_and_the_chart_says_what_it_leaves_out(place, spike) -> None:
    x, y = [*range(1, 1001)], [0.0] * 1000
    y[place] = spike
    chart = draw("token_entropy", [Series("entropy", BLUE, x, y, low=y, high=y)])
    (record,) = chart.data
    assert (record["x"][record["y"].index(spike)], record["x"][0], record["x"][-1]) == (place + 1, 1, 1000)
    assert record["x"] == sorted(record["x"])
    assert MAX_POINTS / 2 <= len(record["x"]) == len(record["low"]) <= MAX_POINTS
    assert chart.missing == ["single points: where there are over 400, the lowest and the highest of each stretch are "
                             "drawn"]  # fmt: skip
    assert draw("token_entropy", [Series("entropy", BLUE, x[:400], y[:400])]).missing == []
