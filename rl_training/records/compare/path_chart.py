"""The chart of entropy against reward: one path per run, and the entropies at equal reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rl_training.records.compare.equal_reward import MIN_PATH_STEPS, RewardPath, path_of
from rl_training.records.compare.final import Difference
from rl_training.records.compare.groups import Group
from rl_training.records.pages.charts import Chart, Series
from rl_training.records.pages.drawing import draw
from rl_training.records.table.estimates import to_rows

# Marks of points:
END = "circle"  # of a run
EQUAL = "square"  # entropy at equal reward


def draw_paths(groups: Sequence[Group], looks: Mapping[str, tuple[str, tuple[int, ...]]],
               pairs: Sequence[Difference]) -> Chart | None:  # fmt: skip
    """Return the chart of all paths; None if no run has one, or if the groups are trained on different tasks.

    Args:
        looks: Colour and stroke of each group, by its letter.
        pairs: Of these, the first with entropies at equal reward is marked.
    """
    if any(pair.other_task for pair in pairs):
        return None
    series: list[Series] = []
    missing = []
    for group in groups:
        color, stroke = looks[group.letter]
        paths = [path for member in group.members if (path := path_of(member.run))]
        for path in paths:
            series += _path(group.name, color, stroke, path)
        if not paths:
            missing.append(f"{group.name} – fewer than {MIN_PATH_STEPS} steps have both reward and entropy")
    if not series:
        return None
    marked = next((pair for pair in pairs if not math.isnan(pair.equal_reward.gap.value)), None)
    if marked:
        for group, entropy in zip((marked.first, marked.second), marked.equal_reward.entropies, strict=True):
            level = [marked.equal_reward.level]
            series.append(Series.cloud(group.name, looks[group.letter][0], EQUAL, level, to_rows({0: entropy})))
    rules = {"x": [marked.equal_reward.level]} if marked else {}
    return draw("path", series, missing, rules=rules, is_marked=marked is not None)


def _path(label: str, color: str, stroke: tuple[int, ...], path: RewardPath) -> list[Series]:
    """Return a run's path, and the dot at its end."""
    line = Series(label, color, path.smooth_rewards, path.smooth_entropies, dash=stroke)
    return [line, Series.cloud(label, color, END, path.smooth_rewards[-1:], path.smooth_entropies[-1:])]
