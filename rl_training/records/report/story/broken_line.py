"""A noisy curve as a few straight pieces: what is left once its noise is taken away.

    noise.py     how large the noise is, and which values are spikes
    pieces.py    where the pieces begin and end

Long series are averaged in MAX_BINS bins first, so that pieces, and all that is read from them, grow with the run.
Entropy, whose noise is proportional to its level, is fitted as a logarithm.

A level at either end has the standard error of a mean over the piece there, or over a quarter of the run if that is
shorter. It leaves out that the pieces were chosen by the same values; tests/records/report/test_broken_line.py has how
often it covers. Thresholds were chosen by hand.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from rl_training.records.report.story.noise import noise_of_mean, without_spikes
from rl_training.records.report.story.pieces import (
    MIN_PIECE,
    bend_last_piece,
    fit_pieces,
    line_or_level,
    shortest_piece,
)
from rl_training.records.table.trends import MIN_STEPS
from rl_training.statistics.estimate import Z_95, Estimate

MIN_VALUES = 5  # for anything at all
MIN_FOR_PIECES = 2 * MIN_PIECE  # values: fewer are one piece, and too few to tell which of them are spikes
MIN_FOR_NORMAL = 16  # values: with fewer, the error of the noise matters
MAX_BINS = 96
RESOLUTION = 0.005  # of the curve's range: least noise, for curves that have none
END = 0.05  # share of the curve that its first and last level average
MANY = 10**6  # degrees of freedom of errors that have what Student's quantile adds in them


@dataclass(frozen=True)
class BrokenLine:
    """A curve without its noise.

    A bin is a place in its arrays; a step is one of the run.

    Args:
        steps: First step of each bin.
        last: Last step.
        values: The curve in each bin, before the fit, or its logarithm.
        fitted: The pieces, at each bin. Never a logarithm.
        pieces: First bin of each piece, and the number of bins last.
        noise: Standard deviation of the noise of `values`, enlarged by its correlation with that of its neighbours.
        is_logarithmic: Whether it was fitted to logarithms: `values`, `noise` and `slope` are shares of the level then.
    """

    steps: np.ndarray
    last: int
    values: np.ndarray
    fitted: np.ndarray
    pieces: list[int]
    noise: float
    is_logarithmic: bool = False

    @functools.cached_property
    def edge(self) -> int:
        """Number of bins at either end that a level averages."""
        return max(1, round(END * len(self.fitted)))

    @property
    def start(self) -> float:
        return float(self.fitted[: self.edge].mean())

    @property
    def now(self) -> float:
        return float(self.fitted[-self.edge :].mean())

    @property
    def now_error(self) -> float:
        """Standard error of `now`, that of the mean of the last piece or of a quarter of the run."""
        return self._level_error(len(self.fitted) - self.pieces[-2], self.now)

    @property
    def rise(self) -> Estimate:
        """The change from `start` to `now`, also of a curve that levels off, which a straight line may miss.

        In noise alone it is significant in 10 % of series of 8 values, in 3 % of 20, and in 16 and 9 % with a
        correlation of .3 (400 series each, seed 0): whoever claims a rise demands a size too.
        """
        start_error = self._level_error(self.pieces[1], self.start)
        return Estimate(self.now - self.start, math.hypot(start_error, self.now_error), MANY)

    def _level_error(self, length: int, level: float) -> float:
        """Return the standard error of a level at either end, from the number of bins of the piece there.

        The noise of few values is poorly known. Below MIN_FOR_NORMAL, Student's quantile widens the error so that twice
        it is about a 95 % interval. Second differences of n values have about (n − 2) / 2 degrees of freedom; below
        MIN_FOR_PIECES the noise is that of the residuals, which have n − 2.
        """
        count = len(self.fitted)
        error = self.noise / math.sqrt(min(length, max(count // 4, MIN_PIECE)))
        if count < MIN_FOR_NORMAL:
            degrees = count - 2 if count < MIN_FOR_PIECES else (count - 2) / 2
            error *= float(stdtrit(degrees, 0.975)) / Z_95
        return error * level if self.is_logarithmic else error

    def at(self, share: float) -> float:
        """Return the curve at a share of the run, from 0 to 1."""
        return float(self.fitted[min(int(share * len(self.fitted)), len(self.fitted) - 1)])

    def step_of(self, place: int) -> int:
        """Return the first step of a bin."""
        return int(self.steps[place])

    def moves_lately(self, share: float, sign: float) -> bool:
        """Return whether the last part of the curve by itself rises (sign 1) or falls (−1) by two standard errors.

        Args:
            share: Of the curve, at which that part begins; it has at least MIN_PIECE bins.
            sign: 1 or −1.
        """
        change, error = self.slope(max(min(int(share * len(self.values)), len(self.values) - MIN_PIECE), 0))
        return sign * change > 2 * error

    def smooth(self) -> np.ndarray:
        """Return the running mean of the fit over half of the shortest piece, so that no single bin is a best level."""
        width = max(shortest_piece(len(self.fitted)) // 2, 1)
        padded = np.pad(self.fitted, (width // 2, width - 1 - width // 2), mode="edge")
        return np.convolve(padded, np.full(width, 1 / width), mode="valid")

    def slope(self, first: int) -> tuple[float, float]:
        """Return the change over all bins from the bin `first` on by a straight line, and its standard error."""
        y = self.values[first:]
        if len(y) < 2:
            return 0.0, math.inf
        x = np.arange(len(y)) - (len(y) - 1) / 2
        squares = float(x @ x)
        return len(y) * float(x @ y) / squares, len(y) * self.noise / math.sqrt(squares)


def broken_line(values: pd.Series[float], logarithmic: bool = False) -> BrokenLine | None:
    """Return the values by step without their noise; None for fewer than MIN_VALUES.

    Args:
        values: Finite values by step.
        logarithmic: Whether noise is proportional to the level, as that of entropy is. The values must be positive.
    """
    if len(values) < MIN_VALUES:
        return None
    steps = values.index.to_numpy()
    levels = values.to_numpy(dtype=float)
    if logarithmic:
        levels = np.log(levels)
    has_pieces = len(levels) >= MIN_FOR_PIECES
    edges = np.linspace(0, len(levels), min(len(levels), MAX_BINS) + 1).round().astype(int)
    binned = np.add.reduceat(without_spikes(levels), edges[:-1]) / np.diff(edges) if has_pieces else levels
    least_noise = max(RESOLUTION * float(np.ptp(binned)), 1e-9 * max(float(np.abs(binned).max()), 1e-9))
    noise = max(noise_of_mean(binned), least_noise)
    if has_pieces:
        fitted, pieces = bend_last_piece(binned, *fit_pieces(binned, noise), noise)
    else:
        fitted = line_or_level(binned, noise)
        pieces = [0, len(binned)]
        # Second differences of so few values may all be small by chance.
        noise = max(float(np.linalg.norm(binned - fitted)) / math.sqrt(len(binned) - 2), least_noise)
    if logarithmic:
        fitted = np.exp(fitted)
    return BrokenLine(steps[edges[:-1]], int(steps[-1]), binned, fitted, pieces, noise, logarithmic)


def rise_of(values: pd.Series[float]) -> Estimate:
    """Return by how much values by step have risen, nan for fewer than MIN_STEPS of them."""
    line = broken_line(values) if len(values) >= MIN_STEPS else None
    return line.rise if line else Estimate.missing(f"a rise needs {MIN_STEPS} logged steps, there are {len(values)}")
