"""How far a curve of rewards lies below its best, since when, and whether that is news.

A fall is no news if the curve has recovered from dips as deep. A first step that broke the policy is a fall too.

Thresholds were chosen by hand, as those of curves.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from rl_training.records.report.story.broken_line import BrokenLine
from rl_training.records.report.story.pieces import MIN_PIECE
from rl_training.records.table.trends import place_of_trailing

# A first step that broke the policy: the first value lies so far above all others, and so much of it is gone.
MIN_HEIGHT_OF_FIRST = 4.5  # standard deviations of one value
MAX_LEFT_OF_FIRST = 0.5  # share of the first value
MIN_LOSS_OF_FIRST = 0.15  # of the highest possible reward, or standard deviations of rewards if that is unknown
# A curve that oscillates: a fall is no news if the curve has recovered from dips of a similar depth.
MIN_DIPS = 2
SIMILAR_DEPTH = 2 / 3  # of the present fall


class Fall(NamedTuple):
    """How far a curve lies below its best.

    Args:
        size: 0 if it does not matter.
        since: Step since which it has fallen; the last step if it has not.
        best: Its best level, within the range of its values.
    """

    size: float
    since: int
    best: float


def find_fall(values: pd.Series[float], line: BrokenLine, least: float, scale: float) -> Fall:
    """Return the fall of a curve from its best level.

    Args:
        values: The curve's values by step.
        line: Their broken line.
        least: Size of a fall that matters.
        scale: The highest possible value, or the standard deviation of single rewards.
    """
    untrained = _untrained(values, line, scale)
    highest = float(values.max())
    best = max(float(line.smooth().max()), line.start, untrained)
    size = best - line.now
    if not size > least or oscillates(-line.smooth(), size):
        return Fall(0.0, line.last, min(best, highest))
    if best == untrained:
        return Fall(size, int(values.index[1]), best)
    place = place_of_trailing(line.fitted < line.now + 0.9 * size) or 0
    if place < MIN_PIECE:  # in the first steps, before which no piece shows how high it was
        best = max(best, float(line.values[: max(place, 1)].mean()))
    return Fall(size, line.step_of(place), min(best, highest))


def _untrained(values: pd.Series[float], line: BrokenLine, scale: float) -> float:
    """Return the first value if what follows is so much lower that the first step must have broken the policy.

    Otherwise −inf. No piece of the line is that short, so the line does not show it. Much must be gone, since one value
    may be an outlier, or a lucky response where hardly any earns a reward.

    Args:
        values, line, scale: As in find_fall.
    """
    first = float(values.iloc[0])
    later = values.iloc[1:]
    noise = line.noise * math.sqrt(len(values) / len(line.values))  # of one value
    is_above = first - float(later.max()) > MIN_HEIGHT_OF_FIRST * noise
    is_lost = line.now < MAX_LEFT_OF_FIRST * first and first - line.now > MIN_LOSS_OF_FIRST * scale
    return first if is_above and is_lost else -math.inf


def oscillates(curve: np.ndarray, size: float) -> bool:
    """Return whether a curve has already come back several times from nearly as large a rise (with −: from a dip)."""
    left = np.minimum.accumulate(curve)
    right = np.minimum.accumulate(curve[::-1])[::-1]
    above = curve - np.maximum(left, right) > SIMILAR_DEPTH * size
    num_peaks = int((np.diff(above.astype(int)) == 1).sum()) + int(above[0])
    return num_peaks >= MIN_DIPS
