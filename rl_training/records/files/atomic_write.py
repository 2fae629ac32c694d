"""Atomic writes: a file exists completely or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from rl_training.errors import UserError

MAKE_ROOM = "make room"
# What to do instead about errors that no room mends.
MOVE_AWAY = "move what is in its place away"
ALLOW = "allow writing there"
INSTEAD_OF_ROOM = {
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP), MOVE_AWAY),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ALLOW),
}
SCRATCH = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")  # temporary names


def write_atomically(files: Mapping[Path, bytes | Iterable[bytes]], fix: str = MAKE_ROOM) -> None:
    """Write all of these files or none: each under a temporary name first, then renamed in order.

    A kill between two renames leaves only the earlier files, so let the last file mark completion. Temporary names are
    random: two processes that write the same file do not mix, and no planted link can lead the write elsewhere.

    Args:
        files: Content by path, whole or as an iterable of parts.
        fix: What the error tells the user to do, as in `cannot_write`.

    Raises:
        UserError: If a file cannot be written, for example on a full disk; names the file and the fix. A failure before
            the renames leaves existing files unchanged.
    """
    scratches: dict[Path, Path] = {}
    path = next(iter(files))
    try:
        with ExitStack() as open_files:
            for path, content in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_leftovers(path.parent)
                scratches[path], file = _open_scratch(path)
                open_files.enter_context(file)  # open, and so locked, until it is renamed
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


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writes to this folder that were killed: those that nobody has locked."""
    with suppress(OSError), os.scandir(folder) as entries:
        for name in [entry.name for entry in entries if SCRATCH.fullmatch(entry.name)]:
            with suppress(OSError):  # it is being written, or was renamed in the meantime
                _remove_if_left(folder / name)


def _remove_if_left(scratch: Path) -> None:
    file = os.open(scratch, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        scratch.unlink()
    finally:
        os.close(file)


def _open_scratch(path: Path) -> tuple[Path, BinaryIO]:
    """Open a new temporary file beside a path, locked so that `remove_leftovers` keeps it."""
    while True:
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        file = open(scratch, "xb")  # noqa: SIM115, x fails if a file or link is there; the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process takes it for a leftover, before it could be locked
            file.close()
            continue
        except OSError:  # a file system without locks, where no leftover is removed either
            return scratch, file
        if scratch.exists():
            return scratch, file
        file.close()


def cannot_write(path: Path, error: OSError, fix: str) -> UserError:
    """Return the error for a file that cannot be written, with its fix.

    Args:
        path: The file.
        error: Why it cannot be written.
        fix: What to do on a full disk. For another cause, what mends that takes the place of MAKE_ROOM in it.
    """
    what = fix.replace(MAKE_ROOM, INSTEAD_OF_ROOM.get(error.errno or 0, MAKE_ROOM))
    return UserError(f"{path} cannot be written ({error.strerror}): {what}")
