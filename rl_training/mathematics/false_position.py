"""The place where a function crosses 0, in few evaluations."""

from __future__ import annotations

from collections.abc import Callable

GROWTH, LONGEST, TRIALS = 4.0, 4.0**7, 20


def crossing(
    function: Callable[[float], float], at_zero: float, at_one: float, limit: float, tolerance: float
) -> float | None:
    """Returns x in (0, limit] at which a function that is negative at 0 has grown to 0 ± tolerance; None if it has not.

    at_zero, at_one  its values there, which are known        limit  at least 1

    Four times as far as long as it is negative, and no further than 4⁷; then by false position, where an end that is
    kept twice counts half (the Illinois rule).

    >>> round(crossing(lambda x: x * x - 9, -9.0, -8.0, limit=100.0, tolerance=1e-6), 3)
    3.0
    >>> crossing(lambda x: x - 9, -9.0, -8.0, limit=5.0, tolerance=1e-6)
    """
    low, of_low, high, of_high = 0.0, at_zero, 1.0, at_one
    while of_high < -tolerance:
        if high >= min(limit, LONGEST):
            return None
        low, of_low, high = high, of_high, min(GROWTH * high, limit)
        of_high = function(high)
    x, value = high, of_high
    for _ in range(TRIALS):
        if abs(value) <= tolerance:
            break
        x = low - of_low * (high - low) / (of_high - of_low)
        value = function(x)
        if value < 0:
            low, of_low, of_high = x, value, 0.5 * of_high
        else:
            high, of_high, of_low = x, value, 0.5 * of_low
    return x
