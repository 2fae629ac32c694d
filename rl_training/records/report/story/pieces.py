"""The straight pieces that a curve consists of, once its noise is known.

Model: the curve is cut into pieces; in each it is level or a straight line, and pieces need not meet. Estimator: of all
ways to cut, the one with the least sum, over the pieces, of

    squared residuals / noise² + PIECE + SLOPE if the piece is a line, not a level.

Source: optimal partitioning, Jackson et al. 2005 (doi 10.1109/LSP.2001.838216), exact by dynamic programming over the
ends of pieces, in O(n²). One decision about the whole curve takes the place of a test of each stretch.

Thresholds: with PIECE and SLOPE pure noise is cut, or given a slope, in at most 5 % of series, and in 11 % if
neighbours have a correlation of .3 (1,000 series each of 20, 40, 96 and 400 values, of the kind that
tests/records/report/test_broken_line.py draws). MIN_PIECE and MIN_BEND were chosen by hand.

A curve that levels off may cost less as one line than as two. If the last piece is such a line, and bends by MIN_BEND
standard errors against its slope, its last quarter gets a slope of its own: the end of the curve is about now.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.special import stdtrit

MIN_PIECE = 4  # values; at least one eighth of all
PIECE = 10.0  # penalty of a piece
SLOPE = 7.0  # further penalty of a piece that is not level
MIN_BEND = 2.0  # standard errors of the quadratic term of a line that levels off


def fit_pieces(values: np.ndarray, noise: float) -> tuple[np.ndarray, list[int]]:
    """Return the fitted values, and the first place of each piece with the number of values last.

    Args:
        values: Equally spaced values; fewer than twice MIN_PIECE are one piece, which line_or_level fits.
        noise: Standard deviation of their noise, as independent values have it.
    """
    level, line = _squared_residuals((values - values.mean()) / noise)
    pieces = _cheapest_pieces(PIECE + np.minimum(level, line + SLOPE))
    fitted = np.empty_like(values)
    for start, end in itertools.pairwise(pieces):
        part = values[start:end]
        fitted[start:end] = part.mean()
        if line[start, end] + SLOPE < level[start, end]:
            x = _centred(end - start)
            fitted[start:end] += x * float(x @ part) / float(x @ x)
    return fitted, pieces


def shortest_piece(number: int) -> int:
    """Return the least number of values of a piece, of this many values in all."""
    return max(MIN_PIECE, number // 8)


def line_or_level(values: np.ndarray, noise: float) -> np.ndarray:
    """Return a line through a few values if its slope is significant at 99 % by its own residuals, else their mean.

    Residuals of so few values may all be small by chance: their deviation counts as half of `noise` at least.
    """
    x = _centred(len(values))
    slope = float(x @ values) / float(x @ x)
    residuals = values - values.mean() - slope * x
    deviation = max(math.sqrt(float(residuals @ residuals) / (len(values) - 2)), 0.5 * noise)
    is_significant = abs(slope) > float(stdtrit(len(values) - 2, 0.995)) * deviation / math.sqrt(float(x @ x))
    return values.mean() + slope * x if is_significant else np.full_like(values, values.mean())


def bend_last_piece(
    values: np.ndarray, fitted: np.ndarray, pieces: list[int], noise: float
) -> tuple[np.ndarray, list[int]]:
    """Return the fit with a bend in its last piece if that is a line that levels off, and the ends of the pieces.

    The quadratic term tests it. The line of the last quarter, which starts where that before it ends, is at most level:
    whether a curve turns back is for the pieces to tell.
    """
    count = len(values)
    first = pieces[-2]
    part = values[first:]
    num_late = max(count // 4, MIN_PIECE)
    rise = float(fitted[-1] - fitted[first])
    if rise == 0 or len(part) < num_late + MIN_PIECE or not _levels_off(part, rise, noise):
        return fitted, pieces
    x = np.arange(len(part)) - (len(part) - num_late - 0.5)  # 0 in the middle between the two lines
    early = np.minimum(x, 0.0)
    late = np.maximum(x, 0.0)
    terms = np.stack([np.ones_like(x), early, late], axis=1)
    factors = np.linalg.lstsq(terms, part, rcond=None)[0]
    if factors[2] * rise < 0:
        terms = terms[:, :2]
        factors = np.linalg.lstsq(terms, part, rcond=None)[0]
    return np.concatenate([fitted[:first], terms @ factors]), [*pieces[:-1], count - num_late, count]


def _levels_off(part: np.ndarray, rise: float, noise: float) -> bool:
    """Return whether a curve bends against its own rise or fall by MIN_BEND standard errors."""
    x = _centred(len(part))
    curved = x**2 - float(x @ x) / len(x)
    squares = float(curved @ curved)
    bend = float(curved @ part) / squares
    return bend * rise < 0 and abs(bend) > MIN_BEND * noise / math.sqrt(squares)


def _cheapest_pieces(cost: np.ndarray) -> list[int]:
    """Return the ends of the pieces with the least total cost, from 0 on; cost[i, j] is that of the stretch [i, j)."""
    number = len(cost) - 1
    shortest = shortest_piece(number)
    least = np.full(number + 1, math.inf)  # cost of the values before each end
    start = np.zeros(number + 1, dtype=int)  # of the last piece up to each end
    least[0] = 0.0
    for end in range(shortest, number + 1):
        totals = least[: end - shortest + 1] + cost[: end - shortest + 1, end]
        start[end] = int(totals.argmin())
        least[end] = totals[start[end]]
    pieces = [number]
    while pieces[0] > 0:
        pieces.insert(0, int(start[pieces[0]]))
    return pieces


def _squared_residuals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of squared residuals of each stretch [i, j) around its mean and around its line."""
    x = np.arange(len(values)) - 0.5 * len(values)
    sums = [np.concatenate([[0.0], np.cumsum(terms)]) for terms in (x**0, x, x * x, values, x * values, values**2)]
    with np.errstate(divide="ignore", invalid="ignore"):
        count, sx, sxx, sy, sxy, syy = (total[None, :] - total[:, None] for total in sums)
        level = syy - sy * sy / count
        line = level - (sxy - sx * sy / count) ** 2 / (sxx - sx * sx / count)
    return np.nan_to_num(level, nan=math.inf), np.nan_to_num(line, nan=math.inf)


def _centred(count: int) -> np.ndarray:
    """Return equally spaced places around 0."""
    return np.arange(count) - (count - 1) / 2
