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

from __future__ import annotations

import argparse
import filecmp
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fsspec import AbstractFileSystem
from tqdm import tqdm

from rl_training.records import sync_source as source
from rl_training.records.sync_source import METRICS, OURS, Checkpoints, Connection, SourceFile, shown

SAME_TIME = 1.0  # seconds: SFTP knows no fractions


@dataclass
class Outcome:
    """What a pass did: `listed` is all that the source holds, `files` what was wanted of it."""

    listed: list[SourceFile]
    files: list[SourceFile]
    copied: list[SourceFile] = field(default_factory=list)
    vanished: int = 0  # deleted at the source since it was listed, as old checkpoints are

    @property
    def unchanged(self) -> int:
        return len(self.files) - len(self.copied) - self.vanished


def sync_once(
    connection: Connection,
    destination: Path,
    checkpoints: Checkpoints = "none",
    checksum: bool = False,
) -> Outcome:
    """Returns what one pass over the source did.

    checksum  compare contents, not times: every file of the same size is fetched to be compared

    Raises FileNotFoundError where there is no source, ValueError for a name that leads out of the destination,
    ConnectionError when retries did not help, OSError when the destination cannot be written to.
    """
    listed = connection.attempt(source.list_files)
    outcome = Outcome(listed, source.wanted(listed, checkpoints))
    targets = {file: target_of(file.relative, destination) for file in outcome.files}  # refused before anything is done
    due = [file for file, target in targets.items() if checksum or not _looks_the_same(file, target)]
    for file in tqdm(due, unit="file", leave=False, file=sys.stderr, disable=not due):
        try:
            if _fetch(connection, file, targets[file], checksum):
                outcome.copied.append(file)
        except FileNotFoundError:
            outcome.vanished += 1
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
    connection = Connection(chosen.source, chosen.retries, pause=1.0, tell=_tell)
    try:
        if chosen.watch is None:
            _one_pass(connection, chosen)
        else:
            _watch(connection, chosen)
    except ConnectionError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (OSError, ValueError) as error:
        way_out = OURS.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        parser.exit(2, f"{parser.prog}: error: {error}{way_out}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped: what has arrived is kept\n")


def _one_pass(connection: Connection, chosen: argparse.Namespace) -> Outcome:
    outcome = sync_once(connection, chosen.destination, chosen.checkpoints, chosen.checksum)
    if not outcome.files:
        raise ValueError(f"{shown(chosen.source)} holds no run: give the folder that has {METRICS}, or one above it")
    vanished = f", {outcome.vanished} deleted there meanwhile" if outcome.vanished else ""
    size = tqdm.format_sizeof(sum(file.size for file in outcome.copied), "B", 1000)
    copied = f"{len(outcome.copied)} file{'s' * (len(outcome.copied) != 1)} copied"
    print(f"{copied} ({size}), {outcome.unchanged} unchanged{vanished}: {chosen.destination}")
    return outcome


def _watch(connection: Connection, chosen: argparse.Namespace) -> None:
    """Makes passes until a run has ended: two in a row that copied nothing, and a report newer than the last step."""
    quiet = 0
    while quiet < 2:
        try:
            outcome = _one_pass(connection, chosen)
            quiet = quiet + 1 if not outcome.copied and source.has_ended(outcome.listed) else 0
        except ConnectionError as error:
            _tell(str(error))
            quiet = 0
        if quiet < 2:
            time.sleep(chosen.watch)
    print("the runs have ended")


def _tell(message: str) -> None:
    tqdm.write(message, file=sys.stderr)
