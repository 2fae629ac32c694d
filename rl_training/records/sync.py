"""Copies runs from another machine or a store to a folder here: logs, reports, evaluations and configuration.

SOURCE is a folder, or anything that fsspec knows:
  sftp://USER@HOST/absolute/path    pip install 'rl-training[sync-ssh]'; keys, agent, config and known_hosts of ssh
  s3://BUCKET/path                  pip install 'rl-training[sync-s3]'; profile and environment of the AWS tools
  gs://…  hf://…                    pip install gcsfs, huggingface_hub

The files of SOURCE are copied to DESTINATION under the same names. Only what changed is copied; a file arrives whole
or not at all; nothing is ever deleted there. After a failure the same command goes on.
"""

# A file is unchanged when size and time are those of the copy, whose time is set to the source's. A log that grows
# while it is copied is copied as it is; its listed time is older than the growth, so the next pass copies it again.
# Hence a connection that breaks needs no more than another pass.

from __future__ import annotations

import argparse
import errno
import filecmp
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from tqdm import tqdm

from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER

Checkpoints = Literal["none", "latest", "all"]
METRICS, REPORT = "logs/metrics.jsonl", "report/report.html"
BROUGHT = (CONFIG_FILE, LOGS_FOLDER, "report", "evaluations")  # of a run, beside checkpoints on request
UNFINISHED = re.compile(r"(^|/)\.[^./]|\.tmp$")  # dotfiles and *.tmp are still being written
# A checkpoint's last file: without it, it is still being written. Groups: its folder, its run, its step.
COMPLETE = re.compile(r"((|.*/)training_state/checkpoint-(\d+)/)trainer_state\.json")
TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # names that file systems have for it
SAME_TIME = 1.0  # seconds: SFTP knows no fractions
# Errors that a retry cannot cure, with the fix: of asyncssh, of botocore, of the disk here.
NO_USE: dict[str | int, str] = {
    "HostKeyNotVerifiable": "its key is not in ~/.ssh/known_hosts: connect once with ssh, and check the key",
    "PermissionDenied": "no key of the ssh agent or of ~/.ssh was accepted: it must work with ssh first",
    "NoCredentialsError": "no AWS credentials were found: set AWS_PROFILE, or run aws configure",
    errno.ENOSPC: "the disk here is full; make room, and run the same command again for the rest",
    errno.EDQUOT: "the quota here is used up; make room, and run the same command again for the rest",
    errno.EROFS: "nothing can be written there; name another DESTINATION",
}


@dataclass(frozen=True)
class SourceFile:
    """A file of the source."""

    path: str  # as the file system names it
    relative: str  # in the source, with / between its parts
    size: int
    modified: float | None  # seconds since 1970; None when the source does not say


@dataclass
class Outcome:
    """What was done: `listed` is all that the source holds, `files` what was wanted of it."""

    listed: list[SourceFile] = field(default_factory=list)
    files: list[SourceFile] = field(default_factory=list)
    fetched: set[SourceFile] = field(default_factory=set)  # with those that were the same by their checksum
    copied: dict[str, SourceFile] = field(default_factory=dict)  # by name
    vanished: int = 0  # deleted at the source since it was listed, as old checkpoints are

    @property
    def unchanged(self) -> int:
        return sum(file.relative not in self.copied for file in self.files) - self.vanished


def sync(
    source: str, destination: Path, checkpoints: Checkpoints = "none", checksum: bool = False, retries: int = 0,
    pause: float = 1.0,
) -> Outcome:  # fmt: skip
    """Returns what was copied of the source.

    checksum  compare contents, not times: every file of the same size is fetched to be compared
    retries   passes in a row that may break without a file that arrived, before it is given up
    pause     seconds before the first, doubled each time

    Raises FileNotFoundError where there is no source, ValueError for a name that leads out of the destination,
    ConnectionError when retries did not help, OSError when the destination cannot be written to.
    """
    outcome, tried = Outcome(), 0
    while True:
        arrived = len(outcome.fetched)
        try:
            _one_pass(source, destination, checkpoints, checksum, outcome)
            return outcome
        except Exception as error:  # each client library has errors of its own
            if way_out := _way_out(error):
                raise ValueError(f"{shown(source)}: {way_out}") from error
            if isinstance(error, FileNotFoundError | PermissionError | ValueError):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
            tried = 0 if len(outcome.fetched) > arrived else tried
            if tried == retries:
                message = f"{shown(source)} failed {tried + 1} times ({reason}): what has arrived is kept"
                raise ConnectionError(f"{message}; run the same command again for the rest") from error
            tqdm.write(f"{reason}; trying again", file=sys.stderr)
            time.sleep(pause * 2**tried)
            tried += 1


def _way_out(error: BaseException | None) -> str:
    """Returns the fix for an error that a retry cannot cure; "" for others."""
    if error is None:
        return ""
    names = [getattr(error, "errno", None), *(kind.__name__ for kind in type(error).__mro__)]
    return next((NO_USE[name] for name in names if name in NO_USE), "") or _way_out(error.__cause__)


def _one_pass(source: str, destination: Path, checkpoints: Checkpoints, checksum: bool, outcome: Outcome) -> None:
    """Copies what is wanted and not fetched yet, over a new connection."""
    filesystem, root = open_source(source)
    outcome.listed = list_files(filesystem, root)
    outcome.files, outcome.vanished = wanted(outcome.listed, checkpoints), 0
    targets = {file: target_of(file.relative, destination) for file in outcome.files}  # refused before anything is done
    left = [file for file in outcome.files if file not in outcome.fetched]
    due = [file for file in left if checksum or not _looks_the_same(file, targets[file])]
    for file in tqdm(due, unit="file", leave=False, file=sys.stderr, disable=not due):
        try:
            if _fetch(filesystem, file, targets[file], checksum):
                outcome.copied[file.relative] = file
            outcome.fetched.add(file)
        except FileNotFoundError:
            outcome.vanished += 1


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
    found: dict[str, dict[str, Any]] = filesystem.find(root, detail=True)
    if not found and not filesystem.exists(root):
        raise FileNotFoundError(f"{root} does not exist")
    start = root.lstrip("/")
    return [
        SourceFile(path, path.lstrip("/").removeprefix(start).removeprefix("/"), int(info["size"]), _modified(info))
        for path, info in sorted(found.items())
        if info.get("type") == "file" and not info.get("islink")
    ]


def _modified(info: dict[str, Any]) -> float | None:
    value = next((info[name] for name in TIMES if info.get(name) is not None), None)
    value = datetime.fromisoformat(value) if isinstance(value, str) else value  # Google's
    return value.timestamp() if isinstance(value, datetime) else value


def wanted(files: Sequence[SourceFile], checkpoints: Checkpoints) -> list[SourceFile]:
    """Returns the files of runs that are to be here: BROUGHT, and complete checkpoints on request."""
    begins = [f"{run}{part}/" for run in _runs_in(files) for part in BROUGHT]
    complete: dict[str, dict[int, str]] = {}
    for match in filter(None, (COMPLETE.fullmatch(file.relative) for file in files)):
        complete.setdefault(match[2], {})[int(match[3])] = match[1]
    for by_step in complete.values() if checkpoints != "none" else ():
        begins += [by_step[max(by_step)]] if checkpoints == "latest" else by_step.values()
    return [f for f in files if f"{f.relative}/".startswith(tuple(begins)) and not UNFINISHED.search(f.relative)]


def _runs_in(files: Sequence[SourceFile]) -> list[str]:
    """Returns what the paths of the runs among the files begin with."""
    return [f.relative.removesuffix(METRICS) for f in files if f"/{f.relative}".endswith(f"/{METRICS}")]


def has_ended(files: Sequence[SourceFile]) -> bool:
    """Returns whether every run has written its report after its last step, as a run does when it ends."""
    modified, runs = {file.relative: file.modified or 0.0 for file in files}, _runs_in(files)
    return bool(runs) and all(modified.get(run + REPORT, -1.0) >= modified[run + METRICS] for run in runs)


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
    if not target.exists() or file.modified is None:
        return False
    here = target.stat()
    return here.st_size == file.size and abs(here.st_mtime - file.modified) <= SAME_TIME


def _fetch(filesystem: AbstractFileSystem, file: SourceFile, target: Path, checksum: bool) -> bool:
    """Returns whether the file was replaced: not where a checksum was asked for and the contents are the same."""
    scratch = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        filesystem.get_file(file.path, str(scratch))
        arrived = scratch.stat().st_size
        if arrived < file.size:
            raise ConnectionError(f"{file.relative} ended after {arrived} of {file.size} bytes")
        if file.modified is not None:
            os.utime(scratch, (file.modified, file.modified))
        same = checksum and target.is_file() and filecmp.cmp(scratch, target, shallow=False)
        os.replace(scratch, target)  # where the contents are the same, for the time
        return not same
    finally:
        with suppress(FileNotFoundError):
            scratch.unlink()


def main(arguments: Sequence[str] | None = None) -> None:
    """Downloads runs as the command line asks; exits with 2 for a mistake, 1 when the source could not be reached."""
    parser = argparse.ArgumentParser(
        prog="rl-training sync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", help="a run, or a folder of runs")
    parser.add_argument("destination", metavar="DESTINATION", type=Path, help="a folder here; made if it is not there")
    parser.add_argument("--checkpoints", choices=["none", "latest", "all"], default="none", help="default: none")
    parser.add_argument("--checksum", action="store_true", help="compare contents, not size and time; fetches all")
    parser.add_argument("--watch", metavar="SECONDS", type=float, help="repeat until the runs have ended")
    parser.add_argument("--retries", metavar="N", type=int, default=5, help="after a broken connection (default: 5)")
    chosen = parser.parse_args(arguments)
    if "://" in str(chosen.destination) or ":/" in str(chosen.destination):
        parser.error(f"DESTINATION is a folder on this machine, not {chosen.destination}")
    if chosen.retries < 0 or (chosen.watch is not None and not 0 < chosen.watch < math.inf):
        parser.error("--watch takes seconds above 0, --retries a number that is not below 0")
    if chosen.destination.exists() and not chosen.destination.is_dir():
        parser.error(f"DESTINATION is a folder, and {chosen.destination} is a file: name another, or remove it")
    here = Path(chosen.source.removeprefix("file://")).resolve()
    if here.is_dir() and chosen.destination.resolve().is_relative_to(here):
        parser.error("DESTINATION lies in SOURCE: each copy would hold the last one; name a folder outside of it")
    try:
        _run(chosen)
    except ConnectionError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped: what has arrived is kept\n")


def _run(chosen: argparse.Namespace) -> None:
    """Copies once, or until a run has ended: two passes that copied nothing, and a report newer than the last step."""
    quiet = 0
    while True:
        try:
            outcome = sync(chosen.source, chosen.destination, chosen.checkpoints, chosen.checksum, chosen.retries)
            _print(outcome, chosen)
            quiet = quiet + 1 if not outcome.copied and has_ended(outcome.listed) else 0
        except ConnectionError as error:
            if chosen.watch is None:
                raise
            tqdm.write(str(error), file=sys.stderr)
            quiet = 0
        if chosen.watch is None:
            return
        if quiet == 2:
            break
        time.sleep(chosen.watch)
    print("the runs have ended")


def _print(outcome: Outcome, chosen: argparse.Namespace) -> None:
    if not outcome.files:
        raise ValueError(f"{shown(chosen.source)} holds no run: give the folder that has {METRICS}, or one above it")
    vanished = f", {outcome.vanished} deleted there meanwhile" if outcome.vanished else ""
    size = tqdm.format_sizeof(sum(file.size for file in outcome.copied.values()), "B", 1000)
    copied = f"{len(outcome.copied)} file{'s' * (len(outcome.copied) != 1)} copied"
    print(f"{copied} ({size}), {outcome.unchanged} unchanged{vanished}: {chosen.destination}")
