"""Files that are there whole or not at all, and JSON in which nan is null."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(files: Mapping[Path, bytes]) -> None:
    """Writes all of these files, or none: each under another name first, then moved in order, the last one last.

    A kill in between leaves the earlier ones at most, so the last is the one to look for. Raises OSError, naming the
    file, where there is no room; what was there before then still is.
    """
    scratches = {path: path.with_name(f"{path.name}.tmp") for path in files}
    path = next(iter(files))
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(scratches[path], "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        for scratch in scratches.values():
            if scratch.is_file():
                scratch.unlink()
        raise OSError(error.errno, f"{error.strerror}; the results cannot be written: make room", str(path)) from error
    for path, scratch in scratches.items():
        scratch.replace(path)


def to_json(value: Any) -> Any:
    """Returns the value with null for numbers that are not finite, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: to_json(inner) for key, inner in value.items()}
    return [to_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """Returns the value with nan for null, settings excepted."""
    if value is None:
        return math.nan
    if isinstance(value, Mapping):
        return {key: inner if key == "settings" else from_json(inner) for key, inner in value.items()}
    return [from_json(inner) for inner in value] if isinstance(value, list) else value
