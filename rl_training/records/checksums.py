"""Checksums of a checkpoint's weights: safetensors keep none, and a changed byte in them would go unnoticed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

CHUNK = 2**24  # bytes read at once


def checksum(path: Path) -> str:
    """Returns the CRC-32 of a file, in hexadecimal digits."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def changed_files(folder: Path, checksums: Mapping[str, str]) -> list[str]:
    """Returns which files in a folder are missing or do not match these checksums."""
    return [
        name
        for name, expected in checksums.items()
        if not (folder / name).is_file() or checksum(folder / name) != expected
    ]
