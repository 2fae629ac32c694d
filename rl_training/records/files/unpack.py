"""Read records, gzipped or not, in bounded memory. Nothing is left out silently.

A kill or a full disk cuts off the last line, or the last gzip member (there is one per step). Such a rest is skipped,
with a warning if it is a gzip member. Damage before the end, which no kill causes, is an error.
"""

from __future__ import annotations

import logging
import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rl_training.errors import UserError
from rl_training.records.files.append import MAX_LINE_BYTES, is_json_object
from rl_training.records.files.limited import read_bytes

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 28  # largest size of a whole file, unpacked
_READ_BYTES = 1 << 14  # read at a time; gzip expands them at most a thousandfold
_MEMBER = b"\x1f\x8b\x08\x00"  # first bytes of a gzip member
_GZIP = 31  # zlib's `wbits` for gzip


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, without their line breaks. The last one may lack its line break.

    Raises:
        UserError: If a line has more than MAX_LINE_BYTES, or a gzip member other than the last is damaged.
    """
    with _opened(path) as file:
        rest = b""  # of a line whose end has not been read
        number = 1  # of that line
        for part in _members(path, file) if path.suffix == ".gz" else iter(lambda: file.read(1 << 20), b""):
            *lines, rest = (rest + part).split(b"\n")
            yield from lines
            number += len(lines)
            if len(rest) > MAX_LINE_BYTES:
                raise UserError(f"{path}, line {number} has over {MAX_LINE_BYTES >> 20} MiB: fix or delete that line")
        if is_json_object(rest):
            yield rest


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): fix it, or move it away") from error


def whole_content(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in .gz.

    Raises:
        UserError: If a gzip file is damaged, or unpacks to more than MAX_BYTES.
    """
    packed = read_bytes(path, MAX_BYTES)
    if path.suffix != ".gz":
        return packed
    unpacker = zlib.decompressobj(_GZIP)
    try:
        content = unpacker.decompress(packed, MAX_BYTES + 1)
    except zlib.error as error:
        raise UserError(f"it is damaged: {error}") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"it unpacks to over {MAX_BYTES >> 20} MiB: gunzip it, if you trust it, and give that file")
    if not unpacker.eof:
        raise UserError("it is damaged: it ends too early")
    return content


def _members(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the unpacked members of a gzip file in parts. A cut or damaged last member gives a warning."""
    start = 0  # where the current member begins in the file
    unpacker = zlib.decompressobj(_GZIP)
    problem = ""
    while not problem and (packed := file.read(_READ_BYTES)):
        while packed and not problem:
            try:
                yield unpacker.decompress(packed)
            except zlib.error as error:
                problem = str(error)
            packed = unpacker.unused_data
            if unpacker.eof:
                start = file.tell() - len(packed)
                unpacker = zlib.decompressobj(_GZIP)
    if not problem and file.tell() > start:
        problem = "it ends too early"
    if problem:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            next_start = content.find(_MEMBER, start + len(_MEMBER))
        if next_start >= 0:
            raise UserError(
                f"{path} is damaged between bytes {start} and {next_start} ({problem}), with more data "
                "after that: get another copy of the file, or move it away"
            )
        logger.warning(f"{path}: its end, from byte {start} on, is damaged ({problem}), as after a kill: skipped")
