"""How pages write numbers, estimates (always with their 95 % interval) and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from rl_training.statistics.estimate import Z_95, Estimate

MISSING = "–"
MILLI = 1e3  # changes of a step are shown in thousandths
ROUNDING = 1e-6  # a value whose whole interval is closer to 0 is rounding error


def format_estimate(estimate: Estimate | None, signed: bool = False, times: float = 1.0) -> str:
    """Return `times` value ± half of its 95 % interval, with two digits of the latter; MISSING if there is no value.

    An interval that is not symmetric gives: value (low … high).
    """
    if estimate is None or math.isnan(estimate.value):
        return MISSING
    sign = "+" if signed else ""
    value = times * estimate.value
    ends = sorted(times * end for end in estimate.bounds())
    half = max((abs(end - value) for end in ends if math.isfinite(end)), default=math.nan)
    if _is_rounding(value / times, half / abs(times)):
        return _near_0(abs(times))
    if estimate.interval and half > 0:
        decimals = _decimals(half)
        texts = [f"{_rounded(number, decimals):{sign}.{decimals}f}" for number in (value, *ends)]
        return "{} ({} … {})".format(*texts).replace("inf", "∞")
    if ends == [-math.inf, math.inf]:  # nothing is known of it; without its ends it would look exact
        return f"{value + 0.0:{sign}.3g} (-∞ … {sign}∞)"
    return plus_minus(value, half, sign)


def milli(estimate: Estimate | None) -> str:
    """Return a change in thousandths, signed, ± half of its 95 % interval."""
    return format_estimate(estimate, signed=True, times=MILLI)


def plus_minus(value: float, half: float, sign: str = "") -> str:
    """Return value ± half, with two digits of `half`; the value alone if `half` is 0 or unknown.

    >>> plus_minus(1.8234, 0.2618, "+")
    '+1.82 ± 0.26'
    """
    if not half > 0:
        return f"{value + 0.0:{sign}.3g}"  # + 0.0: no minus before a 0
    decimals = _decimals(half)
    return f"{_rounded(value, decimals):{sign}.{decimals}f} ± {half:.{decimals}f}"


def normal_milli(value: float, stderr: float) -> str:
    """Return a change in thousandths, signed, ± 1.96 standard errors; MISSING without a value.

    >>> normal_milli(-1.5e-3, 1e-4)
    '-1.50 ± 0.20'
    """
    if _is_rounding(value, Z_95 * stderr):
        return _near_0(MILLI)
    return MISSING if math.isnan(value) else plus_minus(MILLI * value, MILLI * Z_95 * stderr, "+")


def _is_rounding(value: float, half: float) -> bool:
    """Return whether all of value ± half is within ROUNDING of 0, but value is not 0 itself."""
    return value != 0 and half > 0 and abs(value) + half < ROUNDING


def _near_0(times: float) -> str:
    return f"0, to within {ROUNDING * times:g}".replace("e-0", "e-")


def short(value: Any) -> str:
    """Return a number with three digits; texts and whole numbers unchanged, MISSING for nan.

    >>> short(0.5), short(-0.00012345), short(7), short(float("nan"))
    ('0.500', '-1.23e-4', '7', '–')
    """
    if not isinstance(value, float):
        return str(value)
    if value.is_integer():
        return f"{value + 0.0:.0f}"
    if math.isnan(value):
        return MISSING
    return f"{value:.2e}".replace("e-0", "e-") if 0 < abs(value) < 1 / MILLI else f"{value:#.3g}".rstrip(".")


def _decimals(half: float) -> int:
    """Return the number of decimals that shows two digits of a half-width; further digits of the value are noise."""
    return max(0, 1 - math.floor(math.log10(half))) if math.isfinite(half) else 0


def _rounded(number: float, decimals: int) -> float:
    """Return a number rounded to these decimals, without the sign of a number that becomes 0."""
    return round(number, decimals) + 0.0 if math.isfinite(number) else number


def format_level(value: float) -> str:
    """Return a level with two digits behind the point, or two significant ones if it is small.

    >>> format_level(0.876), format_level(0.0123)
    ('0.88', '0.012')
    """
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def percent(share: float) -> str:
    """Return a share in whole percent.

    >>> percent(0.254), percent(-0.001)
    ('25%', '0%')
    """
    return f"{round(100 * share)}%"


def share_left(share: float) -> str:
    """Return a share in percent, with one digit if it is below one."""
    return percent(share) if share > 0.01 else f"{100 * share:.1g}%"


def steps_of(steps: Sequence[int] | pd.Series[float] | pd.Index[int]) -> str:
    """Return the range of these steps, or of the steps of these values, as text.

    >>> steps_of([3]), steps_of([3, 4, 7])
    ('step 3', 'steps 3–7')
    """
    numbers = list(steps.index if isinstance(steps, pd.Series) else steps)
    return f"step {numbers[0]}" if numbers[0] == numbers[-1] else f"steps {numbers[0]}–{numbers[-1]}"


def size_and_side(change: Estimate, more: str, less: str) -> str:
    """Return a difference without its sign, such as "0.050 ± 0.020 nats less".

    >>> size_and_side(Estimate(-0.05, 0.01, 1000), "nats more", "nats less")
    '0.050 ± 0.020 nats less'
    """
    is_less = change.value < 0
    return f"{format_estimate(change, times=-1.0 if is_less else 1.0)} {less if is_less else more}"


def two_digits(number: float) -> str:
    """Return a number rounded to two significant digits, without an exponent.

    >>> two_digits(34567.0), two_digits(math.inf)
    ('35,000', 'inf')
    """
    return f"{float(f'{number:.2g}'):,.0f}"


def on_one_line(text: str) -> str:
    """Return a text without line breaks and repeated spaces, which recorded reasons and names may contain."""
    return " ".join(text.split())


def non_empty_lines(*sentences: str) -> list[str]:
    """Return the sentences that are not empty, each on one line."""
    return [line for sentence in sentences if (line := on_one_line(sentence))]


def capitalized(text: str) -> str:
    """Return a text with a capital first letter, all others as they are.

    >>> capitalized("read what GRPOConfig says")
    'Read what GRPOConfig says'
    """
    return text[:1].upper() + text[1:]


def uncapitalized(text: str) -> str:
    """Return a sentence as part of another: with a small first letter.

    >>> uncapitalized("Entropy is gone")
    'entropy is gone'
    """
    return text[:1].lower() + text[1:]
