"""Append to a file of lines so that its lines stay whole: on a full disk, after a kill, and after a hand's edit."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

from rl_training.errors import UserError

MAX_LINE_BYTES = 1 << 24  # a hundred times the longest line written, a response with its prompt
BLOCK = 1 << 16  # bytes read at once while looking for the last line


def append_whole(path: Path, data: bytes) -> None:
    """Append the data, or nothing of it. A last line that was cut off is removed first; a whole one gets its break.

    Args:
        path: The file; created if it is missing.
        data: Whole lines, or a gzip member of them (for a name that ends in .gz, whose end is not looked at).

    Raises:
        OSError: If it cannot be written, for example on a full disk. The file then ends as before.
        UserError: If the last line has more than MAX_LINE_BYTES.
    """
    with open(path, "a+b", buffering=0) as file:  # unbuffered: nothing is left to be written when it is closed
        size = file.seek(0, os.SEEK_END)
        if path.suffix != ".gz" and size:
            size, data = _mended(path, file, size, data)
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(size)
            raise


def _mended(path: Path, file: FileIO, size: int, data: bytes) -> tuple[int, bytes]:
    """Remove a cut line from the end of the file, and return its size and the data to append."""
    last, start = _last_line(path, file, size)
    if not last:
        return size, data
    if is_json_object(last):
        return size, b"\n" + data
    file.truncate(start)
    return start, data


def _last_line(path: Path, file: FileIO, size: int) -> tuple[bytes, int]:
    """Return what follows the last line break, and where it begins."""
    rest = b""
    start = size
    while start:
        begin = max(0, start - BLOCK)
        file.seek(begin)
        block = file.read(start - begin)
        at = block.rfind(b"\n")
        if at >= 0:
            return block[at + 1 :] + rest, begin + at + 1
        rest = block + rest
        start = begin
        if len(rest) > MAX_LINE_BYTES:
            raise UserError(f"{path}: its last line has over {MAX_LINE_BYTES >> 20} MiB: fix or delete that line")
    return rest, start


def is_json_object(line: bytes) -> bool:
    """Return whether a last line without a line break is a whole JSON object nevertheless."""
    if not line.rstrip().endswith(b"}"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
