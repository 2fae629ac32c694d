"""Read files that somebody else may have written without taking more memory than such a file needs.

A file can be sparse: it claims any size, takes no place on the disk, and fills the memory when it is read whole.
"""

from __future__ import annotations

from pathlib import Path

from rl_training.errors import UserError

MAX_BYTES = 2**20  # a run's settings have about 5 KB
MAX_STATE_BYTES = 2**28  # trainer_state.json holds the log of every step: some kilobytes each
MAX_RESULT_BYTES = 2**26  # of an evaluation's or an analysis's numbers


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raises UserError, naming the file, if it has more than `max_bytes`."""
    size = path.stat().st_size
    if size > max_bytes:  # before any memory is taken for it
        raise UserError(_too_large(path, max_bytes))
    with open(path, "rb") as file:  # read(n) takes memory for n bytes, however few there are
        data = file.read(size + 1)
        if len(data) > size:  # it has grown, or it is no ordinary file
            data += file.read(max_bytes)
    if len(data) > max_bytes:
        raise UserError(_too_large(path, max_bytes))
    return data


def read_text(path: Path, max_bytes: int = MAX_BYTES, errors: str = "replace") -> str:
    """Return the text of a file. Raises UserError, naming the file, if it has more than `max_bytes`."""
    return read_bytes(path, max_bytes).decode("utf-8", errors)


def _too_large(path: Path, max_bytes: int) -> str:
    return f"{path} has more than {max_bytes / 1e6:.0f} MB, which no such file needs: fix or delete it"
