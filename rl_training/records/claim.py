"""Claim the folder that a training writes to: locked, and never one that holds another training.

Every training has an id. It stands in logs/run_id and in the training's checkpoints, so that a training that resumes
finds its records, whatever its folder is called now, and writes into no other training's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.limited import read_text
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.lock import FolderInUse, locked
from rl_training.records.folder import LOGS_FOLDER, has_settings
from rl_training.records.jsonl import METRICS_FILE, PROBES_FILE
from rl_training.records.made_by import is_of_attached_run
from rl_training.records.writer import Records

logger = logging.getLogger(__name__)

RUN_ID_FILE = "run_id"  # in `logs`
RUN_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Claim:
    """A folder that one training writes to, locked until `lock` is closed."""

    folder: Path
    run_id: str
    lock: ExitStack
    requested: Path  # the folder that the user named
    is_new: bool  # whether the folder held no training before
    is_resumed: bool  # whether the training resumes

    def warning(self) -> str:
        """Return what the user must know about the choice, or ""."""
        if not self.is_new:
            return ""
        if self.is_resumed:
            return (
                f"{self.requested} does not hold the records of the training that the checkpoint belongs to, so those "
                f"of this one begin anew in {self.folder}"
            )
        if self.folder == self.requested:
            return ""
        return f"{self.requested} holds another training, so this one is written to {self.folder}"


def claim_folder(requested: Path, run_id: str, fix: str, logs: str = LOGS_FOLDER) -> Claim:
    """Lock the folder of the training with this id: the requested one or one of its numbers, or else a free one.

    Args:
        requested: The folder that the user named. A free one is this folder, or the first free number after it.
        run_id: The id in the checkpoint that training resumes from. "" for a new training.
        fix: What the error tells the user to do if the folder cannot be written to.
        logs: Subfolder of the records, "" if they lie in the folder itself.

    Raises:
        UserError: If the training's own folder is in use, leads out of itself, or cannot be written to.
    """
    if not requested.name:  # "." has no name to append a number to
        requested = requested.absolute()
    if run_id:
        for folder in _numbered(requested):
            if run_id_in(folder / logs) == run_id:
                refuse_links_out(folder)
                return Claim(folder, run_id, _locked(folder, fix), requested, is_new=False, is_resumed=True)
    own_id = run_id if RUN_ID.fullmatch(run_id) else secrets.token_hex(8)
    for number in itertools.count(1):
        folder = requested if number == 1 else requested.with_name(f"{requested.name}-{number}")
        if holds_run(folder, logs):
            continue
        with contextlib.suppress(FolderInUse):
            lock = _locked(folder, fix)
            if holds_run(folder, logs):  # another process has trained there meanwhile
                lock.close()
                continue
            try:
                write_atomically({folder / logs / RUN_ID_FILE: f"{own_id}\n".encode()}, fix)
            except BaseException:
                lock.close()
                raise
            return Claim(folder, own_id, lock, requested, is_new=True, is_resumed=bool(run_id))
    raise AssertionError("numbers do not end")


class RecordsClaim(AbstractContextManager[None]):
    """The claim of one training at a time to the folder of bare `Records`, which it moves to a free folder.

    Args:
        records: The records. Their folder is changed where another training lies in it.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._lock = ExitStack()
        self.requested = records.folder

    def begin(self, run_id: str) -> str:
        """Choose the folder to write to, lock it, and return the id of the training. Only one process may call it.

        Args:
            run_id: The id in the checkpoint that training resumes from. "" for a new training.

        Raises:
            UserError: If the folder cannot be written to.
        """
        self.release()
        folder, logs = split_logs(self.requested)
        claim = claim_folder(folder, run_id, self._records.fix, logs)
        self._lock.push(claim.lock)
        self._records.folder = claim.folder / logs
        if warning := claim.warning():
            logger.warning(warning)
        return claim.run_id

    def release(self) -> None:
        """Unlock the folder, as the end of a `with` block does."""
        self._lock.close()

    def __exit__(self, *of_error: object) -> None:
        self.release()


def holds_run(folder: Path, logs: str = LOGS_FOLDER) -> bool:
    """Return whether a folder holds a training that another one must not write into.

    It does from the first record on, and a job's folder from its config.yaml on. With no record, an attached run's
    config.yaml has nothing to lose.
    """
    files = [folder / logs / name for name in (METRICS_FILE, PROBES_FILE)]
    if any(file.is_file() and file.stat().st_size for file in files):
        return True
    return bool(logs) and has_settings(folder) and not is_of_attached_run(folder)


def run_id_in(logs: Path) -> str:
    """Return the id of the training whose records lie in a folder, or ""."""
    with contextlib.suppress(OSError, ValueError):
        text = read_text(logs / RUN_ID_FILE).strip()
        return text if RUN_ID.fullmatch(text) else ""
    return ""


def numbers_of(requested: Path, logs: str = LOGS_FOLDER) -> list[Path]:
    """Return the folders of a name that hold a training: the name itself, and its numbers."""
    return [folder for folder in _numbered(requested) if holds_run(folder, logs)]


def split_logs(folder: Path) -> tuple[Path, str]:
    """Return the run folder that records in this folder belong to, and the name of their subfolder in it.

    >>> split_logs(Path("runs/a/logs")), split_logs(Path("a")), split_logs(Path("logs"))
    ((PosixPath('runs/a'), 'logs'), (PosixPath('a'), ''), (PosixPath('logs'), ''))
    """
    is_in_run = folder.name == LOGS_FOLDER and bool(folder.parent.name)
    return (folder.parent, LOGS_FOLDER) if is_in_run else (folder, "")


def _numbered(requested: Path) -> Iterator[Path]:
    """Yield the requested folder and those with a number appended to its name, as far as they exist."""
    number_of = re.compile(rf"{re.escape(requested.name)}-([1-9]\d*)")
    with contextlib.suppress(OSError):
        by_number = {
            int(match[1]): path for path in requested.parent.iterdir() if (match := number_of.fullmatch(path.name))
        }
        yield from [requested, *(by_number[number] for number in sorted(by_number))]


def _locked(folder: Path, fix: str) -> ExitStack:
    lock = ExitStack()
    lock.enter_context(locked(folder, fix))
    return lock
