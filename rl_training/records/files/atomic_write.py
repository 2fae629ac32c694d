"""Atomic writes: a file exists completely or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rl_training.errors import UserError

MAKE_ROOM = "make room"


def write_atomically(files: Mapping[Path, bytes | Iterable[bytes]], fix: str = MAKE_ROOM) -> None:
    """Write all of these files or none: each under a temporary name first, then renamed in order.

    A kill between two renames leaves only the earlier files, so let the last file mark completion. Temporary names are
    random: two processes that write the same file do not mix, and no planted link can lead the write elsewhere.

    Args:
        files: Content by path, whole or as an iterable of parts.
        fix: What the error tells the user to do.

    Raises:
        UserError: If a file cannot be written, for example on a full disk; names the file and the fix. A failure before
            the renames leaves existing files unchanged.
    """
    scratches = {path: path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp") for path in files}
    path = next(iter(files))
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(scratches[path], "xb") as file:  # x fails if a file or link is there
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
        raise  # from the iterable of parts


def cannot_write(path: Path, error: OSError, fix: str) -> UserError:
    """Return the error for a file that cannot be written, with its fix."""
    return UserError(f"{path} cannot be written ({error.strerror}): {fix}")
