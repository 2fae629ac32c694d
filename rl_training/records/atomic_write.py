"""Atomic writes: files that exist whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MAKE_ROOM = "the results cannot be written: make room"


def write_atomically(files: Mapping[Path, bytes], fix: str = MAKE_ROOM) -> None:
    """Writes all of these files, or none: each under another name first, then moved in order, the last one last.

    A kill in between leaves at most the earlier ones, so the last one marks completion. Raises OSError, naming the
    file and the fix, when the disk is full; existing files are then unchanged.
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
        raise cannot_write(path, error, fix) from error
    for path, scratch in scratches.items():
        scratch.replace(path)


def cannot_write(path: Path, error: OSError, fix: str) -> OSError:
    """Returns the error of a file that cannot be written, with the fix."""
    return OSError(error.errno, f"{error.strerror}; {fix}", str(path))
