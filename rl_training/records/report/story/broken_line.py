"""A noisy curve as a few straight pieces: what is left once its noise is taken away.

The pieces minimize the squared residuals, in units of the noise, plus a penalty for each piece, and one more for each
piece that is not level (optimal partitioning: Jackson et al. 2005, doi 10.1109/LSP.2001.838216). The penalties are set
such that pure noise is cut, or given a slope, in at most 5 % of series (white noise; up to 10 % with a correlation of
.3 between neighbours): one decision about the whole curve, instead of one for each stretch of it. Long series are
averaged in MAX_BINS bins first, so that pieces, and all that is read from them, grow with the run.

A curve that levels off may cost less as one line than as two. If the last piece is such a line, and bends by MIN_BEND
standard errors against its slope, its last quarter gets a slope of its own: the end of the curve is about now.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from rl_training.records.table.trends import MIN_STEPS
from rl_training.statistics.estimate import Z_95, Estimate

MIN_VALUES = 5  # for anything at all
FEW = 16  # values: with fewer, the error of the noise matters
MAX_BINS = 96
MIN_PIECE = 4  # bins; at least one eighth of all
PIECE, SLOPE = 10.0, 7.0  # penalties, in units of the noise's variance
MAX_CORRELATION = 0.7  # of neighbouring values: beyond, noise cannot be told from a trend
PRIOR_VALUES = 4  # by which the estimated correlation of a short series is drawn towards 0
SPIKE = 4.0  # standard deviations from the neighbours' median at which a value is cut off
RESOLUTION = 0.005  # of the curve's range: least noise, for curves that have none
END = 0.05  # share of the curve that its first and last level average
MANY = 10**6  # degrees of freedom of errors that have what Student's quantile adds in them
MIN_BEND = 2.0  # standard errors of the quadratic term of a line that levels off


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

        Few values tell the noise badly. Below FEW, Student's quantile widens the error so that twice it is about a 95 %
        interval; second differences of n values have about (n − 2) / 2 degrees of freedom, and the residuals of a
        single piece, of which the noise is if there are fewer than 2 MIN_PIECE values, have n − 2.
        """
        count = len(self.fitted)
        error = self.noise / math.sqrt(min(length, max(count // 4, MIN_PIECE)))
        degrees = count - 2 if count < 2 * MIN_PIECE else (count - 2) / 2
        error *= float(stdtrit(degrees, 0.975)) / Z_95 if count < FEW else 1.0
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
        width = max(_shortest(len(self.fitted)) // 2, 1)
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
    steps, levels = values.index.to_numpy(), values.to_numpy(dtype=float)
    if logarithmic:
        levels = np.log(levels)
    edges = np.linspace(0, len(levels), min(len(levels), MAX_BINS) + 1).round().astype(int)
    is_single = len(levels) < 2 * MIN_PIECE  # too few values to tell which of them are spikes
    binned = levels if is_single else np.add.reduceat(_without_spikes(levels), edges[:-1]) / np.diff(edges)
    least = max(RESOLUTION * float(np.ptp(binned)), 1e-9 * max(float(np.abs(binned).max()), 1e-9))
    noise = max(_noise(binned), least)
    fitted, pieces = _fit(binned, noise)
    if is_single:  # second differences of so few values may all be small by chance
        noise = max(float(np.linalg.norm(binned - fitted)) / math.sqrt(len(binned) - 2), least)
    fitted, pieces = _bent(binned, fitted, pieces, noise)
    back = np.exp if logarithmic else np.asarray
    return BrokenLine(steps[edges[:-1]], int(steps[-1]), binned, back(fitted), pieces, noise, logarithmic)


def rise_of(values: pd.Series[float]) -> Estimate:
    """Return by how much values by step have risen, nan for fewer than MIN_STEPS of them."""
    line = broken_line(values) if len(values) >= MIN_STEPS else None
    return line.rise if line else Estimate.missing(f"a rise needs {MIN_STEPS} logged steps, there are {len(values)}")


def _shortest(number: int) -> int:
    return max(MIN_PIECE, number // 8)


def _without_spikes(levels: np.ndarray) -> np.ndarray:
    """Return the values, those far from the median of five neighbours moved towards it."""
    padded = np.pad(levels, 2, mode="edge")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    spread = _deviation(levels - middle) or _deviation(np.diff(levels)) / math.sqrt(2)
    return np.clip(levels, middle - SPIKE * spread, middle + SPIKE * spread) if spread > 0 else levels


def _deviation(values: np.ndarray) -> float:
    """Return the standard deviation by the median of absolute deviations."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _noise(values: np.ndarray) -> float:
    """Return the standard deviation σ√((1 + ρ)/(1 − ρ)) of noise with the correlation ρ, whatever the trend.

    Second differences have no trend. Those of neighbours have the variance 2σ²(1 − ρ)(3 − ρ), those of every other
    value 2σ²(1 − ρ²)(3 − ρ²): their ratio, (1 + ρ)(3 − ρ²)/(3 − ρ), gives ρ.
    """
    of_neighbours, of_others = (
        _trimmed_variance(values[: -2 * lag] - 2 * values[lag:-lag] + values[2 * lag :])
        for lag in (1, 2 if len(values) >= 2 * MIN_PIECE else 1)
    )
    if not of_neighbours > 0:
        return 0.0
    rhos = np.linspace(0.0, MAX_CORRELATION, 50)
    rho = float(np.interp(of_others / of_neighbours, (1 + rhos) * (3 - rhos**2) / (3 - rhos), rhos))
    rho *= len(values) / (len(values) + PRIOR_VALUES)
    return math.sqrt(of_neighbours / (2 * (1 - rho) * (3 - rho)) * (1 + rho) / (1 - rho))


def _trimmed_variance(changes: np.ndarray) -> float:
    """Return the variance, with changes beyond 2.5 standard deviations cut off, and corrected for that."""
    changes = changes - np.median(changes)
    ends = 2.5 * _deviation(changes)
    return 1.06 * float(np.clip(changes, -ends, ends).var()) if ends > 0 else 0.0


def _fit(values: np.ndarray, noise: float) -> tuple[np.ndarray, list[int]]:
    """Return the fitted values and the ends of the pieces."""
    if len(values) < 2 * MIN_PIECE:
        return _single(values, noise), [0, len(values)]
    level, line = _residuals((values - values.mean()) / noise)
    cost = PIECE + np.minimum(level, line + SLOPE)
    shortest = _shortest(len(values))
    best = np.full(len(values) + 1, math.inf)
    before = np.zeros(len(values) + 1, dtype=int)
    best[0] = 0.0
    for end in range(shortest, len(values) + 1):
        totals = best[: end - shortest + 1] + cost[: end - shortest + 1, end]
        before[end] = int(totals.argmin())
        best[end] = totals[before[end]]
    pieces = [len(values)]
    while pieces[0] > 0:
        pieces.insert(0, int(before[pieces[0]]))
    fitted = np.empty_like(values)
    for start, end in itertools.pairwise(pieces):
        part, x = values[start:end], np.arange(end - start) - (end - start - 1) / 2
        is_line = line[start, end] + SLOPE < level[start, end]
        fitted[start:end] = part.mean() + (x * float(x @ part) / float(x @ x) if is_line else 0.0)
    return fitted, pieces


def _bent(values: np.ndarray, fitted: np.ndarray, pieces: list[int], noise: float) -> tuple[np.ndarray, list[int]]:
    """Return the fit with a bend in its last piece if that is a line that levels off, and the ends of the pieces.

    The quadratic term tests it. The line of the last quarter, which starts where that before it ends, is at most level:
    whether a curve turns back is for the pieces to tell.
    """
    count = len(values)
    first = pieces[-2]
    lately = max(count // 4, MIN_PIECE)
    x, part = np.arange(count - first) - (count - first - 1) / 2, values[first:]
    rise = float(fitted[-1] - fitted[first])
    if rise == 0 or len(part) < lately + MIN_PIECE:
        return fitted, pieces
    curved = x**2 - float(x @ x) / len(x)
    squares = float(curved @ curved)
    bend = float(curved @ part) / squares
    if not (bend * rise < 0 and abs(bend) > MIN_BEND * noise / math.sqrt(squares)):
        return fitted, pieces
    until = x - x[-lately] + 0.5  # 0 between the last step before the bend and the first one after it
    before = np.minimum(until, 0.0)
    after = np.maximum(until, 0.0)
    terms = np.stack([np.ones_like(x), before, after], axis=1)
    factors = np.linalg.lstsq(terms, part, rcond=None)[0]
    if factors[2] * rise < 0:
        terms = terms[:, :2]
        factors = np.linalg.lstsq(terms, part, rcond=None)[0]
    return np.concatenate([fitted[:first], terms @ factors]), [*pieces[:-1], count - lately, count]


def _single(values: np.ndarray, noise: float) -> np.ndarray:
    """Return a line through a few values if its slope is significant at 99 % by its own residuals, else their mean."""
    x = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(x @ values) / float(x @ x)
    rest = values - values.mean() - slope * x
    error = max(math.sqrt(float(rest @ rest) / (len(values) - 2)), 0.5 * noise) / math.sqrt(float(x @ x))
    significant = abs(slope) > float(stdtrit(len(values) - 2, 0.995)) * error
    return values.mean() + slope * x * significant


def _residuals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of squared residuals of each stretch [i, j) around its mean and around its line."""
    x = np.arange(len(values)) - 0.5 * len(values)
    sums = [np.concatenate([[0.0], np.cumsum(terms)]) for terms in (x**0, x, x * x, values, x * values, values**2)]
    with np.errstate(divide="ignore", invalid="ignore"):
        count, sx, sxx, sy, sxy, syy = (total[None, :] - total[:, None] for total in sums)
        level = syy - sy * sy / count
        line = level - (sxy - sx * sy / count) ** 2 / (sxx - sx * sx / count)
    return np.nan_to_num(level, nan=math.inf), np.nan_to_num(line, nan=math.inf)
