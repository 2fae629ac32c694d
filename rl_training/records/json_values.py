"""Non-finite numbers in JSON: nan is null, an infinite number null or text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, infinite_as_text: bool = False) -> Any:
    """Returns the value with null for numbers that are not finite, at any depth.

    >>> to_json({"a": [1.0, float("nan")]}), to_json(float("-inf"), infinite_as_text=True)
    ({'a': [1.0, None]}, '-inf')
    """
    if isinstance(value, float):
        kept = str(value) if infinite_as_text and not math.isnan(value) else None
        return value if math.isfinite(value) else kept
    if isinstance(value, Mapping):
        return {key: to_json(inner, infinite_as_text) for key, inner in value.items()}
    return [to_json(inner, infinite_as_text) for inner in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """Returns the value with nan for null, settings excepted."""
    if value is None:
        return math.nan
    if isinstance(value, Mapping):
        return {key: inner if key == "settings" else from_json(inner) for key, inner in value.items()}
    return [from_json(inner) for inner in value] if isinstance(value, list) else value
