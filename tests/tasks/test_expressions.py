"""Arithmetic written by a model is evaluated as Python would, and anything else is refused."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest

from rl_training.tasks.expressions import value_of


def test_arithmetic_has_the_value_of_python() -> None:
    """Compared with Python's own parser and exact fractions, on random expressions."""
    rng = random.Random(0)

    def expression(depth: int) -> str:
        if depth == 0:
            return rng.choice([str(rng.randint(0, 99)), f"{rng.randint(0, 9)}.{rng.randint(0, 9)}"])
        left, right = expression(depth - 1), expression(rng.randrange(depth))
        form = rng.choice(["({} {} {})", "{} {} {}", "-{} {} {}"])
        return form.format(left, rng.choice("+-*/"), right)

    num_values = 0
    for _ in range(200):
        text = expression(3)
        exact = "".join(f"Fraction('{word}')" if word[0].isdigit() else word for word in _words(text))
        try:
            right = eval(exact)  # the test itself made this text
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                value_of(text, Fraction)
            continue
        assert value_of(text, Fraction) == right, text
        num_values += 1
    assert num_values > 150


def _words(text: str) -> list[str]:
    for sign in "+-*/()":
        text = text.replace(sign, f" {sign} ")
    return text.split()


@pytest.mark.parametrize(
    "text",
    [
        "", "+", "1 2", "1,2", "(1, 2)", "[1]", "{1}", "'1'", "1 # 2", "1\n+1",
        "0x1F", "0b11", "0o7", "1e9", "1_0", "1j",
        "1 if 1 else 2", "lambda: 1", "1 and 2", "not 1", "1 < 2", "1 == 1", "~1", "1 // 2", "5 % 3", "1 << 2", "2 @ 3",
        "x", "True", "None", "...", "f(1)", "abs(1)", "abs", "x.y", "(1).real", "1 .real", "abs(1)(2)", "abs(1, 2)",
        "abs(*1)", "abs(x=1)", "abs.x(1)", "(abs)", "(1 for x in y)", "yield", "await x", "x := 1", "__import__('os')",
        "\N{ARABIC-INDIC DIGIT ONE}", "\N{FULLWIDTH DIGIT ONE}", "2\N{SUPERSCRIPT TWO}", "1\x00", "2**0.5", "9" * 5000,
    ],
)  # fmt: skip
def test_anything_but_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|numeral|a root|digits|Fraction"):
        value_of(text, Fraction, functions={} if text == "abs(1)" else {"abs": abs})


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9", "9**9**9", "2**5000", "(2**4000)**2", "2**-5000", "(9**-999)**-999", "((9**999)**99)**9",
        "0.1**9999", "(" * 5000 + "1" + ")" * 5000, "-" * 9000 + "1", "1+" * 4900 + "1", "1" + "**1" * 3000,
        "(" * 199 + "1", "1+" * 10**6,
    ],
)  # fmt: skip
def test_expressions_too_large_to_evaluate_are_refused_at_once(text: str) -> None:
    started = time.process_time()
    with pytest.raises((ValueError, RecursionError)):
        value_of(text, Fraction)
    assert time.process_time() - started < 0.5


def test_only_names_and_functions_given_by_the_caller_are_known() -> None:
    known = {"x": Fraction(3)}
    assert value_of("2*x + half(x + 1)", Fraction, known.__getitem__, {"half": lambda value: value / 2}) == 8
    with pytest.raises(ValueError, match="Call"):
        value_of("x(half)", Fraction, known.__getitem__, {"half": abs})
