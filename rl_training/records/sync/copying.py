"""Copying: a file whole or not at all, a connection that breaks tried again, nothing deleted, nothing written outside.

A file is unchanged when size and time are those of the copy, whose time is set to the source's. A log that grows while
it is copied is copied as it is; its listed time is older than the growth, so the next pass copies it again.
"""

from __future__ import annotations

import errno
import filecmp
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fsspec import AbstractFileSystem

from rl_training.records.sync.listing import Checkpoints, SourceFile, list_files, open_source, shown, wanted

Result = TypeVar("Result")
SAME_TIME = 1.0  # seconds: SFTP knows no fractions
NO_USE = {  # errors of asyncssh and botocore that a retry cannot cure, with the fix
    "HostKeyNotVerifiable": "its key is not in ~/.ssh/known_hosts: connect once with ssh, and check the key",
    "PermissionDenied": "no key of the ssh agent or of ~/.ssh was accepted: it must work with ssh first",
    "NoCredentialsError": "no AWS credentials were found: set AWS_PROFILE, or run aws configure",
}
OURS = {  # errors of the local disk that a retry cannot cure, with the fix
    errno.ENOSPC: ": the disk here is full; make room, and run the same command again for the rest",
    errno.EDQUOT: ": the quota here is used up; make room, and run the same command again for the rest",
    errno.EROFS: ": nothing can be written there; name another DESTINATION",
}


@dataclass
class Outcome:
    """What a pass did: `listed` is all that the source holds, `files` what was wanted of it."""

    listed: list[SourceFile] = field(default_factory=list)
    files: list[SourceFile] = field(default_factory=list)
    copied: int = 0
    copied_bytes: int = 0
    unchanged: int = 0
    vanished: int = 0  # deleted at the source since it was listed, as old checkpoints are


class Connection:
    """A source, reconnected after each failure."""

    def __init__(self, source: str, retries: int, pause: float, tell: Callable[[str], None]) -> None:
        self.source = source
        self._retries = retries
        self._pause = pause  # seconds before the first retry; doubled each time
        self._tell = tell
        self._opened: tuple[AbstractFileSystem, str] | None = None

    def attempt(self, action: Callable[[AbstractFileSystem, str], Result]) -> Result:
        """Returns `action(file system, path)`, retried when the connection breaks.

        Raises ConnectionError when every try fails, and errors that a retry cannot cure as they are.
        """
        for tried in range(self._retries + 1):
            try:
                if self._opened is None:
                    self._opened = open_source(self.source)
                return action(*self._opened)
            except Exception as error:  # each client library has errors of its own
                way_out = _way_out(error)
                if way_out:
                    raise ValueError(f"{shown(self.source)}: {way_out}") from error
                if isinstance(error, FileNotFoundError | PermissionError | ValueError):
                    raise
                if isinstance(error, OSError) and error.errno in OURS:
                    raise
                self._opened = None
                reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
                if tried == self._retries:
                    raise ConnectionError(
                        f"{shown(self.source)} failed {tried + 1} times ({reason}): what has arrived is kept; run the "
                        "same command again for the rest"
                    ) from error
                self._tell(f"{reason}; trying again")
                time.sleep(self._pause * 2**tried)
        raise AssertionError("unreachable")


def _way_out(error: BaseException | None) -> str:
    """Returns the fix for an error that a retry cannot cure; "" for others."""
    if error is None:
        return ""
    known = (NO_USE[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in NO_USE)
    return next(known, "") or _way_out(error.__cause__)


def sync_once(
    connection: Connection,
    destination: Path,
    checkpoints: Checkpoints = "none",
    checksum: bool = False,
    progress: Callable[[Sequence[SourceFile]], Sequence[SourceFile]] = lambda files: files,
) -> Outcome:
    """Returns what one pass over the source did.

    checksum  compare contents, not times: every file of the same size is fetched to be compared
    progress  goes over the files that are to be fetched

    Raises FileNotFoundError where there is no source, ValueError for a name that leads out of the destination,
    ConnectionError when retries did not help, OSError when the destination cannot be written to.
    """
    listed = connection.attempt(list_files)
    outcome = Outcome(listed, wanted(listed, checkpoints))
    targets = {file: target_of(file.relative, destination) for file in outcome.files}  # refused before anything is done
    due = [file for file, target in targets.items() if checksum or not _looks_the_same(file, target)]
    outcome.unchanged = len(outcome.files) - len(due)
    for file in progress(due):
        try:
            replaced = _fetch(connection, file, targets[file], checksum)
        except FileNotFoundError:
            outcome.vanished += 1
            continue
        outcome.copied += replaced
        outcome.copied_bytes += file.size if replaced else 0
        outcome.unchanged += not replaced
    return outcome


def target_of(relative: str, destination: Path) -> Path:
    """Returns where a file of this name goes. Raises ValueError when that would be outside of the destination."""
    parts = relative.split("/")
    strange = any(part in ("", ".", "..") or "\0" in part for part in parts)
    target = destination if strange else destination.joinpath(*parts)
    if strange or not target.parent.resolve().is_relative_to(destination.resolve()):  # a link in the destination
        raise ValueError(
            f"the source holds a file named {relative!r}, which would lie outside {destination} or cannot be created "
            "there: nothing was copied. Rename it at the source, or remove the link in the destination"
        )
    return target


def _looks_the_same(file: SourceFile, target: Path) -> bool:
    try:
        here = target.stat()
    except OSError:
        return False
    return here.st_size == file.size and file.modified is not None and abs(here.st_mtime - file.modified) <= SAME_TIME


def _fetch(connection: Connection, file: SourceFile, target: Path, checksum: bool) -> bool:
    """Returns whether the file was replaced: not where a checksum was asked for and the contents are the same."""
    scratch = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)

    def fetch(filesystem: AbstractFileSystem, _: str) -> None:
        filesystem.get_file(file.path, str(scratch))
        arrived = scratch.stat().st_size
        if arrived < file.size:
            raise ConnectionError(f"{file.relative} ended after {arrived} of {file.size} bytes")

    try:
        connection.attempt(fetch)
        if file.modified is not None:
            os.utime(scratch, (file.modified, file.modified))
        same = checksum and target.is_file() and filecmp.cmp(scratch, target, shallow=False)
        os.replace(scratch, target)  # where the contents are the same, for the time
        return not same
    finally:
        with suppress(FileNotFoundError):
            scratch.unlink()
