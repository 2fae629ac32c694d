"""Atomic writes: files that exist whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rl_training.errors import UserError

MAKE_ROOM = "make room"


def write_atomically(files: Mapping[Path, bytes | Iterable[bytes]], fix: str = MAKE_ROOM) -> None:
    """Write all of these files, whole or part by part, or none: each under another name first, then moved in order.

    A kill in between leaves at most the earlier ones, so the last one marks completion. Raises UserError, naming the
    file and the fix, when the disk is full; existing files are then unchanged. The other name is this call's own: two
    processes that write the same file do not mix, and no link can lie there that would lead the write elsewhere.
    """
    scratches = {path: path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp") for path in files}
    path = next(iter(files))
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(scratches[path], "xb") as file:  # x: neither a file nor a link is there
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                os.fsync(file.fileno())
        for path, scratch in scratches.items():
            scratch.replace(path)
    except BaseException as error:
        for scratch in scratches.values():
            with suppress(OSError):
                scratch.unlink()
        if isinstance(error, OSError):
            raise cannot_write(path, error, fix) from error
        raise  # what the parts are made of cannot be read


def cannot_write(path: Path, error: OSError, fix: str) -> UserError:
    """Return the error of a file that cannot be written, with the fix."""
    return UserError(f"{path} cannot be written ({error.strerror}): {fix}")
