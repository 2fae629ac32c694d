"""What a curve of rewards or of entropy does: where it started, where it is, and which way it goes.

Times are steps of the run, except where a name says that they are bins of the broken line.

Each curve is read from its broken line (broken_line.py), which alone decides what is noise. Here is only what matters:
sizes of changes, in standard deviations of the rewards and in shares of the first entropy (fall.py has how a fall is
found). "Now" is the last quarter of the run, however long it is.

Thresholds were chosen by hand. Rules were changed after some curves of benchmarks/stories.py had been seen; its section
in benchmarks/README.md names them, and has how often others are told right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rl_training.records.report.story.broken_line import BrokenLine, broken_line
from rl_training.records.report.story.fall import find_fall, oscillates
from rl_training.records.report.story.levels import Levels, first_values, levels_of
from rl_training.records.table.trends import place_of_trailing

NOW = 0.75  # share of the run at which the present begins
# Least sizes that matter, of reward in standard deviations of single rewards:
MIN_FALL = 0.15
MIN_FALL_OF_PART = 0.25  # of one of several reward functions, whose weights are a matter of choice
MIN_FALL_OF_TOP = 0.05  # likewise of the paid sum, as a share of its highest possible value
MIN_FALL_IN_ERRORS = 2.5  # likewise, in standard errors
MIN_RISE = 0.05  # over the last quarter
FLAT_BAND = 0.1  # reward that has risen by no more than this is flat
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
        is_news = not oscillates(math.copysign(1.0, change) * self.line.smooth(), abs(change))
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
    fall = find_fall(values, line, least, top if math.isfinite(top) else spread)
    return Reward(name, line, spread, top, fall.size, fall.since, fall.best, levels_of(values, line))


def read_entropy(entropies: pd.Series[float]) -> Entropy | None:
    """Return what entropy does; None for too few values, or if it starts at 0."""
    start = float(first_values(entropies).mean()) if len(entropies) else 0.0
    if not start > 0:
        return None
    line = broken_line(entropies.clip(lower=ENTROPY_FLOOR * start), logarithmic=True)
    return Entropy(line, levels_of(entropies, line)) if line else None
