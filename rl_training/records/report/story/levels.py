"""The numbers at both ends of a run: a report takes them from here alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rl_training.records.report.story.broken_line import BrokenLine
from rl_training.records.report.trends import MAX_WINDOW
from rl_training.records.report.writing import ROUNDING, level, plus_minus, steps_of

FIRST_STEPS = 5  # logged steps whose mean is the level at the start; in short runs one in twenty


@dataclass(frozen=True)
class Levels:
    """A logged number at both ends of a run, as the headline and the table show it.

    Args:
        start: Mean of the first logged steps.
        now: The level at the last step, within the range of the values; None if there is only one value.
        error: Standard error of `now`; nan if unknown, 0 for a number that never changes.
        window: The steps that they cover, in words.
    """

    start: float
    now: float | None
    error: float
    window: str

    @property
    def text(self) -> str:
        if self.now is None:
            return level(self.start)
        return f"{level(self.start)} → {self.text_now}"

    @property
    def text_now(self) -> str:
        assert self.now is not None
        return plus_minus(self.now, 2 * self.error) if self.error > 0 else level(self.now)


def levels_of(values: pd.Series[float], line: BrokenLine | None, error: float = math.nan) -> Levels:
    """Return the levels of a number with at least one value; without a line, the means of its first and last values.

    Args:
        values: Finite values by step.
        line: Their broken line, if there are enough of them for one.
        error: Standard error of its last level, if it is not `line.now_error`.
    """
    if line is None:
        (start, *first), *rest = first_and_last_means(values)
        if not rest:
            return Levels(start, None, math.nan, f"step {first[0]} alone")
        now, *last = rest[0]
        at = f"steps {first[0]} and {last[0]}"
        if first[0] < first[1]:
            at = f"means of steps {first[0]}–{first[1]} and {last[0]}–{last[1]}"
        return Levels(start, now, math.nan, at)
    head = first_values(values)
    at = f"mean of {steps_of(head)}" if len(head) > 1 else steps_of(head)
    if float(np.ptp(values)) <= ROUNDING * float(values.abs().max()):  # a constant has no noise
        return Levels(float(head.mean()), float(values.iloc[-1]), 0.0, f"the same at all steps up to {line.last}")
    window = f"{at} → smoothed level at step {line.last}, ± two standard errors"
    now = min(max(line.now, float(values.min())), float(values.max()))  # a line's end may lie beyond all values
    return Levels(float(head.mean()), now, line.now_error if math.isnan(error) else error, window)


def first_values(values: pd.Series[float]) -> pd.Series[float]:
    """Return the values of the first logged steps, whose mean is the level at the start."""
    return values.head(min(FIRST_STEPS, max(len(values) // 20, 1)))


def first_and_last_means(values: pd.Series[float]) -> list[tuple[float, int, int]]:
    """Return (mean, first step, last step) of the first few values and of the last few; for one value, one entry."""
    window = min(MAX_WINDOW, max(len(values) // 2, 1))
    parts = (values.iloc[:window], values.iloc[window:].tail(window))
    return [(part.mean(), part.index[0], part.index[-1]) for part in parts if len(part)]
