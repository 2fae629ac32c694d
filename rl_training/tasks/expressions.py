"""Evaluates arithmetic that a model wrote, without running it as code.

Python's parser turns the text into a tree, which is evaluated here. Allowed are numerals, + - * / **, parentheses, and
the names and functions that the caller provides; everything else is an error. So a text can call nothing outside the
caller's table, and a power whose digits would fill the memory is refused.

>>> value_of("2*(3 + 6)", Fraction)
Fraction(18, 1)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from numbers import Rational
from typing import Any

MAX_CHARS = 10_000
MAX_BITS = 4096  # of a power whose base is a number
MAX_EXPONENT = 1000  # of any power with a numeric exponent
# The characters of numerals, names and operators. Python's other numerals (0b11, 1e9, 1_0, 1j), strings and comments
# would hide digits from code that searches a text for numbers.
_ALPHABET = re.compile(r"[-+*/() \tA-Za-z0-9.]*")
_NUMERAL = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")
_WORD = re.compile(r"[A-Za-z0-9.]+")
_LETTERS = re.compile(r"[A-Za-z]+")


class NotArithmeticError(ValueError):
    """Raised if a text is not an arithmetic expression, or its value would be too large."""


def value_of(
    text: str,
    number: Callable[[Fraction], Any],
    names: Callable[[str], Any] | None = None,
    functions: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Any:
    """Return the value of an arithmetic expression.

    Args:
        text: Decimal numerals, + - * / **, parentheses, names, and calls of functions with one argument.
        number: Converts the exact value of a numeral to the caller's type of number.
        names: Returns the value of a name, and raises an error for unknown names. None allows no names.
        functions: The functions that may be called, by name.

    Raises:
        NotArithmeticError: For every other text, and for a power that is too large.
        ArithmeticError: For a division by zero.
        RecursionError: For an expression that is nested too deeply.
    """
    text = text.strip()
    if len(text) > MAX_CHARS or not _ALPHABET.fullmatch(text):
        raise NotArithmeticError("not an arithmetic expression: too long, or with characters that none has")
    for word in _WORD.findall(text):
        if not (_NUMERAL.fullmatch(word) or _LETTERS.fullmatch(word)):
            raise NotArithmeticError(f"neither a numeral nor a name: {word[:40]}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError) as error:  # MemoryError: the parser's stack overflows
        raise NotArithmeticError(f"not an arithmetic expression: {error}") from error
    return _Evaluator(text, number, names, functions or {}).value(tree)


class _Evaluator:
    """Evaluates the nodes of one tree. The arguments are those of `value_of`."""

    def __init__(
        self,
        text: str,
        number: Callable[[Fraction], Any],
        names: Callable[[str], Any] | None,
        functions: Mapping[str, Callable[[Any], Any]],
    ) -> None:
        self._text = text
        self._number = number
        self._names = names
        self._functions = functions

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return self._number(Fraction(self._text[node.col_offset : node.end_col_offset]))
            case ast.UnaryOp(op=ast.UAdd()):
                return self.value(node.operand)
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand)
            case ast.BinOp():
                return self._operation(node)
            case ast.Name() if self._names is not None:
                return self._names(node.id)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in self._functions:
                return self._functions[name](self.value(argument))
        raise NotArithmeticError(f"not an arithmetic operation: {type(node).__name__}")

    def _operation(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.Pow():
                return power(left, right)
        raise NotArithmeticError(f"not an arithmetic operation: {type(node.op).__name__}")


def power(base: Any, exponent: Any) -> Any:
    """Return base ** exponent. Raise NotArithmeticError if it is too large, or an inexact root of a Fraction."""
    if isinstance(base, Fraction) and exponent.denominator != 1:
        raise NotArithmeticError("a root: numbers are exact here")
    if _is_rational(exponent):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) if _is_rational(base) else 1
        if abs(exponent) > MAX_EXPONENT or bits * abs(exponent) > MAX_BITS:
            raise NotArithmeticError("a power with too many digits")
    return base**exponent


def _is_rational(value: Any) -> bool:
    return isinstance(value, Rational)
