"""Checks single values of a configuration against their type and range.

Each error is one line that names key, value and fix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import ListConfig

from rl_training.errors import UserError
from rl_training.options import check_choice

INTERVAL = re.compile(r"(int|float) ([\[(])(\S+), (\S+)([\])])( or null)?(.*)")  # as written in ranges.yaml


def check_allowed(key: str, value: Any, allowed: str | Sequence[Any]) -> None:
    """Raise UserError for a value that is not one of these choices, or not in this interval of ranges.yaml.

    >>> check_allowed("top_p", 2.0, "float (0, 1] or null for the run's")
    Traceback (most recent call last):
    rl_training.errors.UserError: top_p=2.0 must be above 0 and at most 1, or null for the run's
    """
    if not isinstance(allowed, str):
        check_choice(key, value, allowed)
        return
    interval = INTERVAL.fullmatch(allowed)
    assert interval, allowed
    kind, start, least, most, end, or_null, hint = interval.groups()
    hint = ", or null" * bool(or_null) + hint
    if value is None and or_null:
        return
    check_kind(key, value, 0 if kind == "int" else 0.0, hint)
    is_too_low = value <= float(least) if start == "(" else value < float(least)
    is_too_high = value >= float(most) if end == ")" else value > float(most)
    if is_too_low or is_too_high:
        above = "above" if start == "(" else "at least"
        below = "below" if end == ")" else "at most"
        highest = "" if most == "inf" else f" and {below} {float(most):.10g}"
        raise UserError(f"{key}={value} must be {above} {float(least):g}{highest}{hint}")


def check_kinds(given: Mapping[Any, Any], defaults: Mapping[Any, Any], prefix: str = "") -> None:
    """Raise UserError for a value whose type differs from the default's: text for a number, a number for a list.

    Settings whose default is null, unset or absent may have any value. Settings whose default is text may have any
    value except null; the code that reads them checks it.
    """
    for key, default in defaults.items():
        if key in given and default is not None:
            check_kind(f"{prefix}{key}", given[key], default)


def check_kind(key: str, value: Any, default: Any, hint: str = "") -> None:
    """Raise UserError, which ends with the hint, for a value whose type differs from the default's."""
    if isinstance(default, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{key}={value} must be a group of settings: {key}.NAME=VALUE")
        check_kinds(value, default, f"{key}.")
    elif isinstance(default, list | ListConfig):
        if not isinstance(value, list | ListConfig):
            raise UserError(f"{key}={value} must be a list: '{key}=[…]'")
        for element in value if default else ():
            check_kind(key, element, default[0], " in the list")
    elif isinstance(default, str):
        if value is None:
            raise UserError(f"{key}=null has no meaning: leave it out")
    elif isinstance(default, bool):
        if type(value) is not bool:
            raise UserError(f"{key}={value} must be true or false{hint}")
    elif type(value) is not int and (isinstance(default, int) or type(value) is not float):
        raise UserError(f"{key}={value} must be a {'whole ' * isinstance(default, int)}number{hint}")
    elif not math.isfinite(value):
        raise UserError(f"{key}={value} must be finite{hint}")
