r"""Reads the one number that an answer states: plainly, as arithmetic, or as the value of an equation.

A policy learns whatever is rewarded, so the whole text must state the number: only a unit (units.py), a currency sign
and formula delimiters are skipped. `17 or 18`, `x > 17`, `18 \text{ million}` and `\boxed{18}17` state no number. An
equation states one only if its left side is a single symbol, or if all its sides are equal.

Numbers are exact fractions. No text is run as code, and none takes more than a few milliseconds.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from rl_training.tasks.expressions import NotArithmeticError, value_of
from rl_training.tasks.units import is_unit, nouns_of

MAX_CHARS = 200  # enough for any number
_DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\[,!])[0-9]{3})+|[0-9]+)"  # 1,000 and LaTeX's 1{,}000, 1\,000, 1\!000
_WORD = r"[A-Za-z°][A-Za-z°.'’/-]*"
_UNIT = rf"(?P<unit>\s*/?\s*{_WORD}(?:\s+{_WORD}){{0,5}})?\s*\.?"
_PLAIN_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:\\?\$|[£€])?\s*(?P<inner_sign>[-+]?)
    (?:
        (?:(?P<whole>{_DIGITS})\s+)?(?P<top>{_DIGITS})\s*/\s*(?P<bottom>{_DIGITS})   # 36/2, 17 1/2
        | (?P<decimal>{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)
    )
    \s*(?:\\?%|\\?\$|[£€¢])?\$?
    {_UNIT}""",
    re.VERBOSE,
)
_LONE_SYMBOL = re.compile(
    r"(?!not\b)(?:[A-Za-z]|[A-Za-z]{3,})(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?"
)  # before `=`: x, x_1, Total
_DELIMITERS = [  # delimiters around a whole formula
    re.compile(rf"{before}(.*){after}", re.DOTALL)
    for before, after in (
        (r"\\\(", r"\\\)"), (r"\\\[", r"\\\]"), (r"\$\$", r"\$\$"), (r"\$", r"\$"), (r"\*\*", r"\*\*"),
        (r"\\f?boxed\s*\{", r"\}"),
    )
]  # fmt: skip
_TEXT = re.compile(r"\\(?:text|mbox|mathrm)\s*\{([^{}\\]*)\}")
_ARITHMETIC = re.compile(rf"(?P<arithmetic>.*[0-9.)}}]){_UNIT}", re.DOTALL)
_SEPARATED = re.compile(rf"(?<![0-9.]){_DIGITS}(?![0-9])")
_FRACTION = r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"
_LATEX_TO_ARITHMETIC = [
    (re.compile(r"\\(?:left|right|bigl?|bigr?)\s*(?=[()])|\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\\?\$\s*(?=[0-9.])"), " "),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])|[×·⋅]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"\\([dt]?frac)\s*([0-9])\s*([0-9])(?![0-9])"), r"\\\1{\2}{\3}"),
    (re.compile(r"\^\s*([0-9])(?![0-9.])"), r"**\1"),  # not 2^10, which is ambiguous: 2^1 · 0 or 2^{10}
]
_BRACES_TO_PARENTHESES = [  # applied repeatedly, innermost first
    (re.compile(rf"(?<![0-9.])([0-9]+)\s*{_FRACTION}"), r"(\1+(\2)/(\3))"),  # a mixed number, 17\frac{1}{2}
    (re.compile(_FRACTION), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\s*\{([^{}]*)\}"), r"sqrt(\1)"),
    (re.compile(r"\^\s*\{([^{}]*)\}"), r"**(\1)"),
    (re.compile(r"(?<![A-Za-z0-9)}\s])\s*\{([^{}]*)\}"), r"(\1)"),
]
_IMPLIED_PRODUCT = re.compile(r"(?<=[0-9)])\s*(?=\(|sqrt\()")


def stated_number(text: str, question: str | None = None) -> Fraction | None:
    r"""Return the exact value of the one number that a text states, or None if it does not state exactly one.

    Besides plain numbers, it reads arithmetic, in plain text or LaTeX, and equations.

    Args:
        text: The answer.
        question: Its nouns may be units, in addition to units of measurement. None allows any word that does not
            change a number.

    >>> [str(stated_number(text)) for text in (r"\boxed{\frac{36}{2}}", "x = 18", "2 + 16 = 18 eggs", "17 = 18")]
    ['18', '18', '18', 'None']
    """
    if len(text) > MAX_CHARS:
        return None
    text = _without_delimiters(text.replace("\N{MINUS SIGN}", "-"))
    first, *others = _TEXT.sub(r" \1 ", text).split("=")
    if others and _LONE_SYMBOL.fullmatch(first.strip()):
        first, *others = others
    nouns = None if question is None else nouns_of(question)
    values = {_value(side.strip(), nouns) for side in (first, *others)}
    return values.pop() if len(values) == 1 else None


def parse_number(text: str, nouns: frozenset[str] | None = None) -> Fraction | None:
    """Return the exact value of a plain number, or None for any other text.

    A plain number is an integer, decimal, fraction or mixed number in ASCII digits. It may have a sign, thousands
    separators, a currency or percent sign (both ignored), bold marks, a unit of up to six words and a full stop.
    `nouns` is passed to `is_unit`.

    Examples: `"-$1,000.50"` is -2001/2, `"36/2"` and `"18 eggs per day."` are 18, `"18 or 20"` is None.
    """
    if len(text) > MAX_CHARS:
        return None
    text = " ".join(text.removeprefix("**").removesuffix("**").replace("\N{MINUS SIGN}", "-").split())
    if len(text) > 2 and text[0] == text[-1] == "$":  # a formula between dollar signs, $18$
        text = text[1:-1].strip()
    match = _PLAIN_NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["inner_sign"]) or not is_unit(match["unit"] or "", nouns):
        return None
    if match["decimal"] is not None:
        value = Fraction(_without_separators(match["decimal"]))
    elif int(_without_separators(match["bottom"])) == 0:
        return None
    else:
        value = Fraction(*(int(_without_separators(match[part])) for part in ("top", "bottom")))
        value += int(_without_separators(match["whole"] or "0"))
    return -value if "-" in (match["sign"], match["inner_sign"]) else value


def _without_separators(digits: str) -> str:
    return re.sub(r"[^0-9.]", "", digits).removesuffix(".")


def _without_delimiters(text: str) -> str:
    r"""Remove \(…\), $…$, **…** and \boxed{…} if they enclose the whole text."""
    text = text.strip()
    for marks in _DELIMITERS:
        if match := marks.fullmatch(text):
            return _without_delimiters(match[1])
    return text


def _value(side: str, nouns: frozenset[str] | None) -> Fraction | None:
    if (value := parse_number(side, nouns)) is not None:
        return value
    match = _ARITHMETIC.fullmatch(side)
    if match is None or not is_unit(match["unit"] or "", nouns):
        return None
    try:
        value = value_of(_as_arithmetic(match["arithmetic"]), Fraction, functions={"sqrt": _root})
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return value


def _as_arithmetic(latex: str) -> str:
    r"""Translate LaTeX to the notation of `value_of`. Anything beyond arithmetic is left in, and `value_of` refuses it.

    >>> _as_arithmetic(r"2(3+6) - 1{,}000 \div \frac{1}{2}")
    '2*(3+6) - 1000 / ((1)/(2))'
    """
    text = _SEPARATED.sub(lambda digits: _without_separators(digits[0]), latex)
    for pattern, arithmetic in _LATEX_TO_ARITHMETIC:
        text = pattern.sub(arithmetic, text)
    before = ""
    while text != before:
        before = text
        for pattern, arithmetic in _BRACES_TO_PARENTHESES:
            text = pattern.sub(arithmetic, text)
    return _IMPLIED_PRODUCT.sub("*", text)


def _root(number: Fraction) -> Fraction:
    """Return the square root of a square. Raise NotArithmeticError for any number whose root is not a fraction."""
    root = Fraction(math.isqrt(number.numerator), math.isqrt(number.denominator))
    if root * root != number:
        raise NotArithmeticError(f"{number} has no square root among the fractions")
    return root
