"""Non-finite numbers in JSON: nan is null, an infinite number null or text; and a reader of JSON lines."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
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


def parsed_lines(path: Path, lines: Iterable[str]) -> Iterator[Any]:
    """Yields the value of each line of a file. ValueError with the number of a line that cannot be read."""
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged ({error}): mend or delete that line") from error
        yield content


def complete_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file, packed or not, without what a kill has left of the last one."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as packed, suppress(EOFError, zlib.error, gzip.BadGzipFile):
            yield from (line for line in packed if line.endswith("\n"))
    else:
        with open(path, encoding="utf-8") as file:
            yield from (line for line in file if line.endswith("\n"))
