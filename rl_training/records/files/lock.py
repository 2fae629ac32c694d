"""A lock on a folder, held by one process at a time. The operating system releases it, however the process ends.

The file .lock names the holder and is never removed; its existence alone locks nothing. (On file systems without locks
filelock would use the existence of such a file instead, which outlives a killed process.)
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rl_training.errors import UserError
from rl_training.records.files.atomic_write import cannot_write

logger = logging.getLogger(__name__)

LOCK = ".lock"
_held: set[int] = set()  # file descriptors of this process


def _release_in_child() -> None:
    """Close inherited descriptors: a fork would otherwise keep the lock after the process that took it has ended."""
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


class FolderInUse(UserError):
    """Another process is writing to the folder."""


@contextlib.contextmanager
def locked(folder: Path, fix: str) -> Iterator[None]:
    """Hold the folder's lock inside this context. A file system without locks only causes a warning.

    Args:
        folder: Created if it is missing.
        fix: What the error tells the user to do if the folder cannot be written to.

    Raises:
        FolderInUse: If another process holds the lock; names it.
        UserError: If the folder cannot be written to.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise cannot_write(path, error, fix) from error
    _held.add(file)
    try:
        _take(file, folder)
        yield
    finally:
        if file in _held:  # false in a fork
            _held.remove(file)
            os.close(file)


def _take(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        other = os.pread(file, 1000, 0).decode(errors="replace") or "another process"
        fix = "wait until it has ended, or stop it"
        if other.startswith(f"{_this_process()} "):
            other = f"this very {other}"
            fix = "end what writes there first, such as an earlier `with attach(...)`"
        raise FolderInUse(f"{folder} is being written to by {other}: {fix}") from error
    except OSError as error:
        logger.warning(
            f"{folder} lies on a file system without locks ({error.strerror}): nothing keeps a second process from "
            "writing there too, so start only one"
        )
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
        os.ftruncate(file, 0)
        os.pwrite(file, f"{_this_process()} since {since}".encode(), 0)


def _this_process() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"
