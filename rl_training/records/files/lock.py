"""A lock on a folder, for one process at a time. The operating system frees it however that process ends.

Its file, .lock, says who holds it, and stays: a file that is there locks nothing. (filelock makes a lock of such a file
where a file system has no other, and that one outlives a killed process.)
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
_held: set[int] = set()  # descriptors of this process


def _let_go_in_a_fork() -> None:
    """Closes what a fork has inherited: it would hold the lock beyond the end of the process that took it."""
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_a_fork)


class FolderInUse(UserError):
    """Another process is writing to a folder."""


@contextlib.contextmanager
def locked(folder: Path, fix: str) -> Iterator[None]:
    """A context that one process at a time can enter; a folder without locks is entered with a warning.

    fix  what to do where the folder cannot be written to

    Raises UserError that names the process that is in it, or the folder that cannot be written to.
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
        if file in _held:  # not in a fork
            _held.remove(file)
            os.close(file)


def _take(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        other = os.pread(file, 1000, 0).decode(errors="replace") or "another process"
        raise FolderInUse(f"{folder} is being written to by {other}: wait until it has ended, or stop it") from error
    except OSError as error:
        logger.warning(
            f"{folder} lies on a file system without locks ({error.strerror}): nothing keeps a second process from "
            "writing there too, so start only one"
        )
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {os.uname().nodename} since {since}".encode(), 0)
