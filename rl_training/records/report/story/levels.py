"""The numbers at both ends of a run: a report takes them from here alone.

The start is the mean of the first steps. The end is that of the broken line (broken_line.py), or, of values too few for
one, the mean of the last steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import pandas as pd

from rl_training.records.pages.writing import ROUNDING, format_level, plus_minus, steps_of
from rl_training.records.report.story.broken_line import BrokenLine
from rl_training.records.table.trends import MAX_WINDOW

FIRST_STEPS = 5  # logged steps whose mean is the level at the start; in short runs one in twenty


class WindowKind(Enum):
    """What the numbers at both ends are."""

    SINGLE = auto()  # one value, at the start
    MEANS = auto()  # of the first and of the last values
    SMOOTHED = auto()  # a mean, and the end of the broken line
    CONSTANT = auto()  # the same at all steps


@dataclass(frozen=True)
class Window:
    """The steps that the numbers at both ends of a run cover.

    Args:
        kind: What these numbers are.
        first: First and last step of the first number.
        last: Of the last one.
    """

    kind: WindowKind
    first: tuple[int, int]
    last: tuple[int, int]

    @property
    def text(self) -> str:
        """The window in words."""
        start = steps_of(self.first)
        if self.kind is WindowKind.CONSTANT:
            return f"the same at all steps up to {self.last[1]}"
        if self.kind is WindowKind.SINGLE:
            return f"{start} alone"
        is_single = self.first[0] == self.first[1]
        if self.kind is WindowKind.SMOOTHED:
            head = start if is_single else f"mean of {start}"
            return f"{head} → smoothed level at step {self.last[1]}, ± two standard errors"
        if is_single:
            return f"steps {self.first[0]} and {self.last[0]}"
        return f"means of {start} and {self.last[0]}–{self.last[1]}"


@dataclass(frozen=True)
class Levels:
    """A logged number at both ends of a run, as the headline and the table show it.

    Args:
        start: Mean of the first logged steps.
        now: The level at the last step, within the range of the values; None if there is only one value.
        error: Standard error of `now`; nan if unknown, 0 for a number that never changes.
        window: The steps that they cover.
    """

    start: float
    now: float | None
    error: float
    window: Window

    @property
    def text(self) -> str:
        if self.now is None:
            return format_level(self.start)
        return f"{format_level(self.start)} → {self.text_now}"

    @property
    def text_now(self) -> str:
        assert self.now is not None
        return plus_minus(self.now, 2 * self.error) if self.error > 0 else format_level(self.now)


def levels_of(values: pd.Series[float], line: BrokenLine | None) -> Levels:
    """Return the levels of a number with at least one value; without a line, the means of its first and last values.

    Args:
        values: Finite values by step.
        line: Their broken line, if there are enough of them for one.
    """
    if line is None:
        return _levels_of_few(values)
    head = first_values(values)
    start = float(head.mean())
    ends = _ends(head)
    if float(np.ptp(values)) <= ROUNDING * float(values.abs().max()):  # a constant has no noise
        return Levels(start, float(values.iloc[-1]), 0.0, Window(WindowKind.CONSTANT, ends, (line.last, line.last)))
    now = min(max(line.now, float(values.min())), float(values.max()))  # a line's end may lie beyond all values
    return Levels(start, now, line.now_error, Window(WindowKind.SMOOTHED, ends, (line.last, line.last)))


def first_values(values: pd.Series[float]) -> pd.Series[float]:
    """Return the values of the first logged steps, whose mean is the level at the start."""
    return values.head(min(FIRST_STEPS, max(len(values) // 20, 1)))


def _levels_of_few(values: pd.Series[float]) -> Levels:
    """Return the means of the first and of the last values, or the only value."""
    length = min(MAX_WINDOW, max(len(values) // 2, 1))
    head = values.iloc[:length]
    tail = values.iloc[length:].tail(length)
    if tail.empty:
        return Levels(float(head.mean()), None, math.nan, Window(WindowKind.SINGLE, _ends(head), _ends(head)))
    window = Window(WindowKind.MEANS, _ends(head), _ends(tail))
    return Levels(float(head.mean()), float(tail.mean()), math.nan, window)


def _ends(values: pd.Series[float]) -> tuple[int, int]:
    """Return the first and the last step of these values."""
    return int(values.index[0]), int(values.index[-1])
