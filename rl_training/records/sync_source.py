"""The source of `rl-training sync`: its connection, what it holds of runs, and which of it is wanted.

Wanted of a run (a folder with logs/metrics.jsonl): config.yaml, logs/, report/, evaluations/; checkpoints on request.
Left out: dotfiles and *.tmp, which are still being written; links; files outside of runs.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER

Checkpoints = Literal["none", "latest", "all"]
Result = TypeVar("Result")
METRICS, REPORT = "logs/metrics.jsonl", "report/report.html"
BROUGHT = (CONFIG_FILE, LOGS_FOLDER, "report", "evaluations")  # first parts of a path in a run
# A checkpoint's last file: without it, it is still being written. Groups: its folder, its run, its step.
COMPLETE = re.compile(r"((|.*/)training_state/checkpoint-(\d+)/)trainer_state\.json")
TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # names that file systems have for it
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


@dataclass(frozen=True)
class SourceFile:
    """A file of the source."""

    path: str  # as the file system names it
    relative: str  # in the source, with / between its parts
    size: int
    modified: float | None  # seconds since 1970; None when the source does not say


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
        tried = 0
        while True:
            try:
                self._opened = self._opened or open_source(self.source)
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
                tried += 1


def _way_out(error: BaseException | None) -> str:
    """Returns the fix for an error that a retry cannot cure; "" for others."""
    if error is None:
        return ""
    known = (NO_USE[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in NO_USE)
    return next(known, "") or _way_out(error.__cause__)


def open_source(source: str) -> tuple[AbstractFileSystem, str]:
    """Returns a new connection to the source, and the path in it. ValueError where nothing installed speaks to it."""
    if re.fullmatch(r"\w+:/*", source):
        raise ValueError(f"{source} has no path: give BUCKET/path or HOST/path after it, see --help")
    # Those of ~/.ssh/known_hosts; the default of sshfs is to trust whoever answers.
    options = {"known_hosts": ()} if source.startswith(("sftp://", "ssh://")) else {}
    try:
        filesystem, path = url_to_fs(source, skip_instance_cache=True, **options)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{shown(source)}: {error}; what each protocol needs is in rl-training sync --help") from error
    return filesystem, str(path).rstrip("/")


def shown(source: str) -> str:
    """Returns the source as it may be printed: a password in it is masked."""
    return re.sub(r"(://[^/@:]*):[^@/]*@", r"\1:***@", source)


def list_files(filesystem: AbstractFileSystem, root: str) -> list[SourceFile]:
    """Returns all files below `root`, without links, sorted by path. Raises FileNotFoundError when there is no root."""
    filesystem.invalidate_cache()  # of an earlier listing
    found: Mapping[str, Mapping[str, Any]] = filesystem.find(root, detail=True)
    if not found and not filesystem.exists(root):
        raise FileNotFoundError(f"{root} does not exist")
    start = root.lstrip("/")
    return [
        SourceFile(path, path.lstrip("/").removeprefix(start).removeprefix("/"), int(info["size"]), _modified(info))
        for path, info in sorted(found.items())
        if info.get("type") == "file" and not info.get("islink")
    ]


def _modified(info: Mapping[str, Any]) -> float | None:
    value = next((info[name] for name in TIMES if info.get(name) is not None), None)
    value = datetime.fromisoformat(value) if isinstance(value, str) else value  # Google's
    return value.timestamp() if isinstance(value, datetime) else value


def runs_in(files: Iterable[SourceFile]) -> list[str]:
    """Returns the runs among the files: what their paths begin with."""
    return [f.relative.removesuffix(METRICS) for f in files if f"/{f.relative}".endswith(f"/{METRICS}")]


def wanted(files: Sequence[SourceFile], checkpoints: Checkpoints) -> list[SourceFile]:
    """Returns the files to download; of checkpoints only complete ones."""
    complete: dict[str, dict[int, str]] = {}
    for match in filter(None, (COMPLETE.fullmatch(f.relative) for f in files)):
        complete.setdefault(match[2], {})[int(match[3])] = match[1]
    begins = [f"{run}{part}/" for run in runs_in(files) for part in BROUGHT]
    for by_step in complete.values() if checkpoints != "none" else ():
        begins += [by_step[max(by_step)]] if checkpoints == "latest" else by_step.values()
    return [f for f in files if f"{f.relative}/".startswith(tuple(begins)) and not _is_unfinished(f.relative)]


def _is_unfinished(relative: str) -> bool:
    parts = PurePosixPath(relative).parts
    return relative.endswith(".tmp") or any(part.startswith(".") and part != ".." for part in parts)


def has_ended(files: Sequence[SourceFile]) -> bool:
    """Returns whether every run has written its report after its last step, as a run does when it ends."""
    modified, runs = {f.relative: f.modified or 0.0 for f in files}, runs_in(files)
    return bool(runs) and all(modified.get(run + REPORT, -1.0) >= modified[run + METRICS] for run in runs)
