"""What a curve of rewards or of entropy does: where it started, where it is, and which way it goes.

Times are steps of the run, except where a name says that they are bins of the broken line.

Each curve is read from its broken line (broken_line.py), which alone decides what is noise. Here is only what matters:
sizes of changes, in standard deviations of the rewards and in shares of the first entropy. "Now" is the last quarter of
the run, however long it is.

Thresholds were chosen by hand. Rules were changed after some curves of benchmarks/stories.py had been seen; its section
in benchmarks/README.md names them, and has how often others are told right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from rl_training.records.report.story.broken_line import BrokenLine, broken_line
from rl_training.records.report.story.levels import Levels, first_values, levels_of
from rl_training.records.report.story.pieces import MIN_PIECE
from rl_training.records.table.trends import place_of_trailing

NOW = 0.75  # share of the run at which the present begins
# Least sizes that matter, of reward in standard deviations of single rewards:
MIN_FALL = 0.15
MIN_FALL_OF_PART = 0.25  # of one of several reward functions, whose weights are a matter of choice
MIN_FALL_OF_TOP = 0.05  # likewise of the paid sum, as a share of its highest possible value
MIN_FALL_IN_ERRORS = 2.5  # likewise, in standard errors
MIN_RISE = 0.05  # over the last quarter
FLAT_BAND = 0.1  # reward that has risen by no more than this is flat
# A first step that broke the policy: the first value lies so far above all others, and so much of it is gone.
MIN_HEIGHT_OF_FIRST = 4.5  # standard deviations of one value
MAX_LEFT_OF_FIRST = 0.5  # share of the first value
MIN_LOSS_OF_FIRST = 0.15  # of the highest possible reward, or standard deviations of rewards if that is unknown
# A curve that oscillates: a fall is no news if the curve has recovered from dips of a similar depth.
MIN_DIPS = 2
SIMILAR_DEPTH = 2 / 3  # of the present fall
# Of entropy:
MIN_ENTROPY_CHANGE = 0.03  # share of its level, over the last quarter
MIN_ENTROPY_CHANGE_OF_FIRST = 0.01  # likewise, as a share of the first level
ENTROPY_FLOOR = 1e-3  # share of the first level: less is as good as nothing


@dataclass(frozen=True)
class Reward:
    """A curve of rewards.

    Args:
        name: "reward", the name of a reward function, or "held-out reward".
        line: Its broken line.
        spread: Standard deviation of single rewards.
        top: The highest possible value; nan if unknown.
        fall: By how much it lies below its best, if that matters; otherwise 0.
        since: Step since which it has fallen; the last step if it has not.
        best: Its best level, within the range of its values.
        levels: Its levels at both ends.
        is_penalty: Whether it is a reward function with a negative weight, or without a positive value: its falls say
            that it is incurred, not that something good was lost.
        weight: Of a reward function; nan if it is not recorded.
    """

    name: str
    line: BrokenLine
    spread: float
    top: float
    fall: float
    since: int
    best: float
    levels: Levels
    is_penalty: bool = False
    weight: float = math.nan

    @property
    def start(self) -> float:
        return self.levels.start

    @property
    def now(self) -> float:
        return self.line.now

    @property
    def rises(self) -> bool:
        """Whether it has risen in the last quarter by what matters, and has not fallen."""
        return not self.fall and self.now - self.line.at(NOW) > MIN_RISE * self.spread

    @property
    def has_risen(self) -> bool:
        """Whether it lies above its start by as much as a fall that matters."""
        return self.now - self.start > MIN_FALL * self.spread

    def is_at_ceiling(self, share: float) -> bool:
        """Return whether it is within this share of the highest possible reward; False if that is unknown."""
        return self.now >= share * self.top

    @property
    def flat_since(self) -> int:
        """The step since which it has not risen by more than FLAT_BAND."""
        return self.line.step_of(self._first_flat_bin)

    @property
    def largest_gain_while_flat(self) -> float:
        """Upper end of the 95 % interval of its change since then; at least 0."""
        change, error = self.line.slope(self._first_flat_bin)
        return max(change + 2 * error, 0.0)

    @property
    def _first_flat_bin(self) -> int:
        band = max(FLAT_BAND * self.spread, 2 * self.line.now_error)
        return place_of_trailing(self.line.fitted >= self.now - band) or 0


@dataclass(frozen=True)
class Entropy:
    """The curve of token entropy, in nats."""

    line: BrokenLine
    levels: Levels

    @property
    def start(self) -> float:
        return self.levels.start

    @property
    def now(self) -> float:
        return self.line.now

    @property
    def left(self) -> float:
        """Share of the first entropy that is left."""
        return self.now / self.start

    @property
    def change(self) -> float:
        """Change over the last quarter, as a share of the level before; 0 if it does not matter."""
        before = self.line.at(NOW)
        change = self.now - before
        matters = abs(change) > max(MIN_ENTROPY_CHANGE_OF_FIRST * self.start, MIN_ENTROPY_CHANGE * before)
        is_news = not _oscillates(math.copysign(1.0, change) * self.line.smooth(), abs(change))
        return change / before if matters and is_news else 0.0

    @property
    def reach(self) -> float:
        """Largest change that the last half allows, as a share of the level; the slope is one of logarithms."""
        change, error = self.line.slope(len(self.line.values) // 2)
        return math.expm1(min(abs(change) + 2 * error, 50.0))

    @property
    def highest_at(self) -> int:
        """The step at which it was highest, and from which on it was lost."""
        return self.line.step_of(int(self.line.fitted.argmax()))

    def since_below(self, share: float) -> int:
        """Return the step since which less than a share of the first entropy is left."""
        place = place_of_trailing(self.line.fitted < share * self.start)
        return self.line.step_of(place if place is not None else len(self.line.steps) - 1)

    def lost_since(self, step: int) -> float:
        """Return the share of entropy that was lost since a step."""
        place = max(int(np.searchsorted(self.line.steps, step, side="right")) - 1, 0)
        return 1 - self.now / max(float(self.line.fitted[place]), self.now)


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


def read_reward(
    name: str, values: pd.Series[float], spread: float, top: float, min_fall: float = MIN_FALL
) -> Reward | None:
    """Return what a curve of rewards does; None for too few values.

    Args:
        name: As in Reward.
        values: Finite values by step.
        spread: Standard deviation of single rewards; where it is 0, the scatter of the values takes its place.
        top: The highest possible value; nan if unknown.
        min_fall: Least fall that matters, in standard deviations of single rewards.
    """
    line = broken_line(values)
    if line is None:
        return None
    if not spread > 0:
        spread = max(4 * line.noise, float(np.ptp(line.fitted)))
    least = max(min_fall * spread, MIN_FALL_IN_ERRORS * line.now_error)
    if math.isfinite(top):
        least = max(least, MIN_FALL_OF_TOP * top)
    fall = _find_fall(values, line, least, _untrained(values, line, top if math.isfinite(top) else spread))
    return Reward(name, line, spread, top, fall.size, fall.since, fall.best, levels_of(values, line))


def _find_fall(values: pd.Series[float], line: BrokenLine, least: float, untrained: float) -> Fall:
    """Return the fall of a curve from its best level.

    Args:
        values: The curve's values by step.
        line: Their broken line.
        least: Size of a fall that matters.
        untrained: The level of the policy that the first step broke; −inf if it broke none.
    """
    highest = float(values.max())
    best = max(float(line.smooth().max()), line.start, untrained)
    size = best - line.now
    if not size > least or _oscillates(-line.smooth(), size):
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
        values: Rewards by step.
        line: Their broken line.
        scale: The highest possible reward, or the standard deviation of single rewards.
    """
    first = float(values.iloc[0])
    later = values.iloc[1:]
    noise = line.noise * math.sqrt(len(values) / len(line.values))  # of one value
    is_above = first - float(later.max()) > MIN_HEIGHT_OF_FIRST * noise
    is_lost = line.now < MAX_LEFT_OF_FIRST * first and first - line.now > MIN_LOSS_OF_FIRST * scale
    return first if is_above and is_lost else -math.inf


def read_entropy(entropies: pd.Series[float]) -> Entropy | None:
    """Return what entropy does; None for too few values, or if it starts at 0."""
    start = float(first_values(entropies).mean()) if len(entropies) else 0.0
    if not start > 0:
        return None
    line = broken_line(entropies.clip(lower=ENTROPY_FLOOR * start), logarithmic=True)
    return Entropy(line, levels_of(entropies, line)) if line else None


def _oscillates(curve: np.ndarray, size: float) -> bool:
    """Return whether a curve has already come back several times from nearly as large a rise (with −: from a dip)."""
    left = np.minimum.accumulate(curve)
    right = np.minimum.accumulate(curve[::-1])[::-1]
    above = curve - np.maximum(left, right) > SIMILAR_DEPTH * size
    num_peaks = int((np.diff(above.astype(int)) == 1).sum()) + int(above[0])
    return num_peaks >= MIN_DIPS
