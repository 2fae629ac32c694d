"""Entropy is low where it has been below the level for the last 25 steps: an alarm, and no forecast."""

import math
from collections.abc import Sequence

from forecasters import History
from rl_training.mathematics.forecast import Ahead

SOURCE = "rlwatch 0.5.1 (PyPI): its warning, consecutive_steps // 2 of 50; its level of 1 nat in the place of ours"
ALARM_ONLY = True
CONSECUTIVE = 25


def forecast(history: History, horizons: Sequence[int]) -> list[Ahead]:
    enough = len(history.entropy) >= CONSECUTIVE
    highest = math.log(float(history.entropy[-CONSECUTIVE:].max())) if enough else math.inf
    return [Ahead(highest, math.nan) for _ in horizons]
