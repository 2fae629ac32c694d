"""JSON as records use it: nan is null, infinite numbers are text, and what others wrote is read within limits."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.errors import UserError
from rl_training.options import is_number
from rl_training.records.files.masking import mask_line, without_secrets
from rl_training.records.files.printable import escape_surrogates

MAX_DIGITS = 300  # of an integer; a longer one is read as a float, because converting it later could overflow
MAX_COUNT = 2**53  # largest step or other count
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escaped surrogate, lone or one of a pair
MAX_LEVELS = 50  # of nesting: no run writes as many


def parse_json(text: str) -> Any:
    """Parse JSON, and write out lone surrogates. Raises ValueError if the text is malformed or nested too deeply."""
    try:
        value = DECODER.decode(text)
    except RecursionError:
        raise UserError("nested too deeply") from None
    return escape_surrogates(value) if ESCAPED_SURROGATE.search(text) else value


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) < MAX_DIGITS else float(digits)


DECODER = json.JSONDecoder(parse_int=_whole_number)  # json.loads would make one for each line


def checked_count(value: Any) -> int:
    """Return the value if it is an integer of at most MAX_COUNT in size; otherwise raise UserError."""
    if type(value) is not int or abs(value) > MAX_COUNT:
        raise UserError(f"{str(value)[:40]!r}, which is not a count")
    return value


def checked_text(value: Any) -> str:
    """Return the value if it is a text, "" for null (None or nan); otherwise raise UserError."""
    if not isinstance(value, str | None) and value == value:
        raise UserError(f"{str(value)[:40]!r}, which is not a text")
    return value if isinstance(value, str) else ""


def checked_number(value: Any) -> float:
    """Return the value as a float if it is a number, nan (null) included; otherwise raise UserError."""
    if not is_number(value):
        raise UserError(f"{str(value)[:40]!r}, which is not a number")
    return float(value)


def to_json(value: Any, infinite_as_text: bool = False) -> Any:
    """Return the value with every non-finite number, at any depth, replaced by null.

    Numbers of NumPy, and arrays and tensors of one entry, become Python's own numbers.

    Args:
        infinite_as_text: Write infinite numbers as text instead of null.

    >>> to_json({"a": [1.0, float("nan")]}), to_json(float("-inf"), infinite_as_text=True)
    ({'a': [1.0, None]}, '-inf')
    """
    if _has_one_entry(value):
        value = value.item()
    if isinstance(value, float):
        replacement = str(value) if infinite_as_text and not math.isnan(value) else None
        return value if math.isfinite(value) else replacement
    if isinstance(value, Mapping):
        return {key: to_json(inner, infinite_as_text) for key, inner in value.items()}
    return [to_json(inner, infinite_as_text) for inner in value] if isinstance(value, list | tuple) else value


def _has_one_entry(value: Any) -> bool:
    """Return whether a value is a number of NumPy, or an array or tensor of one entry.

    By its members, not by its type: a report must not wait for torch to be imported.
    """
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and math.prod(shape) == 1 and hasattr(value, "item")


def from_json(value: Any, verbatim: Sequence[str] = (), levels: int = MAX_LEVELS) -> Any:
    """Return the value with null as nan, at any depth. Raises UserError if it is nested too deeply.

    Args:
        verbatim: Keys whose values are returned as they are, with null as None.
    """
    if value is None:
        return math.nan
    if not levels:
        raise UserError("nested too deeply")
    if isinstance(value, Mapping):
        plain = (float, int, str)  # a shortcut for most values: a run has some hundred thousand
        return {
            key: inner if isinstance(inner, plain) or key in verbatim else from_json(inner, verbatim, levels - 1)
            for key, inner in value.items()
        }
    return [from_json(inner, verbatim, levels - 1) for inner in value] if isinstance(value, list) else value


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with secrets masked, and with values that JSON cannot represent turned into text."""
    plain = to_json(without_secrets(_with_text_keys(settings)), infinite_as_text=True)
    return dict(json.loads(json.dumps(plain, default=lambda value: mask_line(str(value)))))


def _with_text_keys(node: Any) -> Any:
    """Return nested settings with their keys as text, dataclasses as mappings and sets as lists."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        node = {field.name: getattr(node, field.name, None) for field in dataclasses.fields(node)}
    if isinstance(node, Mapping):
        return {str(key): _with_text_keys(value) for key, value in node.items()}
    if isinstance(node, set | frozenset):
        node = sorted(node, key=str)
    return [_with_text_keys(value) for value in node] if isinstance(node, list | tuple) else node
