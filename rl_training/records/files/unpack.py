"""Read records, packed by gzip or not, at bounded memory, and never less of them without a word.

A kill or a full disk leaves a part of a line, or of the last gzip member (there is one for each step). It is left out,
with a warning where it is a member. Damage before that, which no kill leaves, is an error.
"""

from __future__ import annotations

import logging
import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rl_training.errors import UserError

logger = logging.getLogger(__name__)

MOST_LINE_BYTES = 1 << 24  # the longest that is written, a response with its prompt, has a hundredth
MOST_BYTES = 1 << 28  # of a whole file, unpacked
_READ_BYTES = 1 << 14  # at a time: they unpack to a thousand times as many at most
_MEMBER = b"\x1f\x8b\x08\x00"  # begins a gzip member
_GZIP = 31  # zlib's name for the format


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends, up to the last end of a line.

    Raises:
        UserError: for a line of more than MOST_LINE_BYTES, and for a gzip member that is damaged and not the last one.
    """
    with _opened(path) as file:
        rest, number = b"", 1
        for part in _members(path, file) if path.suffix == ".gz" else iter(lambda: file.read(1 << 20), b""):
            *lines, rest = (rest + part).split(b"\n")
            yield from lines
            number += len(lines)
            if len(rest) > MOST_LINE_BYTES:
                raise UserError(f"{path}, line {number} has over {MOST_LINE_BYTES >> 20} MiB: mend or delete that line")


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): mend it, or move it away") from error


def whole_content(path: Path) -> bytes:
    """Return what a file holds, unpacked where its name ends in .gz.

    Raises:
        UserError: for a gzip file that is damaged, or unpacks to more than MOST_BYTES.
    """
    packed = path.read_bytes()
    if path.suffix != ".gz":
        return packed
    unpacker = zlib.decompressobj(_GZIP)
    try:
        content = unpacker.decompress(packed, MOST_BYTES + 1)
    except zlib.error as error:
        raise UserError(f"it is damaged: {error}") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"it unpacks to over {MOST_BYTES >> 20} MiB: gunzip it, if you trust it, and give that file")
    if not unpacker.eof:
        raise UserError("it is damaged: it ends too early")
    return content


def _members(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield what the members of a gzip file unpack to, in parts; a warning where the last one is cut or damaged."""
    start, unpacker = 0, zlib.decompressobj(_GZIP)  # of the member: where it begins in the file
    problem = ""
    while not problem and (packed := file.read(_READ_BYTES)):
        while packed and not problem:
            try:
                yield unpacker.decompress(packed)
            except zlib.error as error:
                problem = str(error)
            packed = unpacker.unused_data
            if unpacker.eof:
                start, unpacker = file.tell() - len(packed), zlib.decompressobj(_GZIP)
    if not problem and file.tell() > start:
        problem = "it ends too early"
    if problem:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            next_start = content.find(_MEMBER, start + len(_MEMBER))
        if next_start >= 0:
            raise UserError(
                f"{path} is damaged between bytes {start} and {next_start} ({problem}), and there is more behind: take "
                "another copy of it, or move it away"
            )
        logger.warning(f"{path}: its end, from byte {start} on, is damaged ({problem}), as a kill leaves it: left out")
