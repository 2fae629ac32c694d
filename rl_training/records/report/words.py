"""How pages write an estimate, with the 95 % interval always, and the sentences of templates/words.txt."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import is_significant

ENVIRONMENT = Environment(
    loader=PackageLoader(__package__), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
MISSING = "–"
MILLI, Z_95 = 1e3, 1.96  # changes of a step are shown in thousandths


def in_words(estimate: Estimate | None, signed: bool = False, times: float = 1.0) -> str:
    """Returns value ± half of the 95 % interval, with two digits of the latter, times a factor; MISSING without one.

    Of an interval that is not symmetric: value (low … high).
    """
    if estimate is None or math.isnan(estimate.value):
        return MISSING
    sign, (value, *ends) = "+" * signed, (times * number for number in (estimate.value, *estimate.ends()))
    half = max((abs(end - value) for end in ends if math.isfinite(end)), default=math.nan)
    if estimate.interval and half > 0:
        written, low, high = (f"{number + 0.0:{sign}.{_decimals(half)}f}" for number in (value, *ends))
        return f"{written} ({low} … {high})".replace("inf", "∞")
    return plus_minus(value, half, sign)


def plus_minus(value: float, half: float, sign: str = "") -> str:
    """Returns value ± half, with two digits of `half`; the value alone where that is 0 or not known.

    >>> plus_minus(1.8234, 0.2618, "+")
    '+1.82 ± 0.26'
    """
    value += 0.0  # no minus before a 0
    if not half > 0:
        return f"{value:{sign}.3g}"
    decimals = _decimals(half)
    return f"{value:{sign}.{decimals}f} ± {half:.{decimals}f}"


def normal_milli(value: float, stderr: float) -> str:
    """Returns a change in thousandths, with its sign ± 1.96 standard errors; MISSING without a value.

    >>> normal_milli(-1.5e-3, 1e-4)
    '-1.50 ± 0.20'
    """
    return MISSING if math.isnan(value) else plus_minus(MILLI * value, MILLI * Z_95 * stderr, "+")


def short(value: Any) -> str:
    """Returns a number with three digits; a text or a whole number as it is, MISSING for nan.

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
    """Returns how many decimals say two digits of a half width: the rest of the value is noise."""
    return max(0, 1 - math.floor(math.log10(half)))


def sentences(block: str, **numbers: Any) -> list[str]:
    """Returns what a block of words.txt says of these numbers: a sentence up to each ¶, without empty ones."""
    template = ENVIRONMENT.get_template("words.txt")
    text = "".join(template.blocks[block](template.new_context(numbers)))
    return [said for part in text.split("¶") if (said := " ".join(part.split()))]


def table(block: str, **numbers: Any) -> list[list[str]]:
    """Returns the rows of a table in words.txt, with its headings as the first: cells are parted by ¦."""
    return [[cell.strip() for cell in row.split("¦")] for row in sentences(block, **numbers)]


ENVIRONMENT.filters |= {
    "in_words": in_words, "milli": partial(in_words, signed=True, times=MILLI), "normal_milli": normal_milli,
    "short": short, "about": lambda number: f"{float(f'{number:.2g}'):,.0f}",
}  # fmt: skip
ENVIRONMENT.tests |= {
    "significant": is_significant,
    "finite": math.isfinite,
    "infinite": math.isinf,
    "above_0": lambda estimate: estimate.ends()[0] > 0,
    "below_0": lambda estimate: estimate.ends()[1] < 0,
    "without_value": lambda estimate: math.isnan(estimate.value),
}
