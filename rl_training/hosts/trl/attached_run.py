"""The folder of an attached training: which one it is, its config.yaml, and the report at its end.

The main process writes it. All processes learn which folder it is, and why it cannot be written to.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.extras import require_extra
from rl_training.parallel.ranks import all_ranks
from rl_training.records.config import is_of_attached_run, write_config
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.lock import FolderInUse, locked
from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER, REPORT_FOLDER, refuse_a_file
from rl_training.records.jsonl import METRICS_FILE, PROBES_FILE, Records

logger = logging.get_logger(__name__)

ELSEWHERE = "give attach another folder"


class AttachedRun:
    """The folder that one training writes to: the one that was asked for, or the next free number.

    asked   as the user has given it
    folder  the one that is written to, once training has begun
    """

    def __init__(self, asked: str | Path) -> None:
        self.asked = Path(asked).expanduser()
        if not self.asked.name:  # "." has no name that a number could follow
            self.asked = self.asked.absolute()
        for path in (self.asked, self.asked / LOGS_FOLDER, self.asked / REPORT_FOLDER):
            refuse_a_file(path)
        self.folder = self.asked
        self.has_begun = False
        self._lock = contextlib.ExitStack()

    def begin(self, run_name: str | None) -> None:
        """Settle which folder is written to, and lock it. A collective.

        Args:
            run_name: The folder's name that the checkpoint remembers from which training goes on; None for a new
                training, which never writes to the folder of another.

        Raises:
            UserError: on all processes, where the folder cannot be written to.
        """
        refusal = ""
        if all_ranks().number == 0:
            try:
                self.folder = self._lock_free_folder() if run_name is None else self._lock_own_folder(run_name)
            except UserError as error:
                refusal = str(error)
        folder, refusal = broadcast_object_list([str(self.folder), refusal])
        if refusal:
            raise UserError(refusal)
        self.folder, self.has_begun = Path(folder), True
        if all_ranks().number == 0 and run_name is None and self.folder != self.asked:
            logger.warning(f"{self.asked} holds another training, so this one is written to {self.folder}")

    def _lock_free_folder(self) -> Path:
        for number in itertools.count(1):
            folder = self.asked if number == 1 else self.asked.with_name(f"{self.asked.name}-{number}")
            if holds_another_run(folder):
                continue
            with contextlib.suppress(FolderInUse):
                self._lock.enter_context(locked(folder, ELSEWHERE))
                if not holds_another_run(folder):  # nobody has trained there meanwhile
                    return folder
                self._lock.close()
        raise AssertionError("numbers do not end")

    def _lock_own_folder(self, run_name: str) -> Path:
        resumed_folder = self.asked.with_name(run_name) if run_name else self.asked
        folder = resumed_folder if resumed_folder.is_dir() else self.asked
        refuse_links_out(folder)
        self._lock.enter_context(locked(folder, ELSEWHERE))
        return folder

    def records(self) -> Records:
        """Return the records in the folder."""
        return Records(self.folder / LOGS_FOLDER)

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Write config.yaml, secrets masked."""
        write_config(self.folder, settings)

    def end(self, how: str) -> str:
        """Write the report, on the main process, and free the folder.

        Args:
            how: how training has ended, in words.

        Returns:
            The line that says so, and where the report lies, or why there is none; "" on other processes.
        """
        try:
            return self.write_report(how) if all_ranks().number == 0 else ""
        finally:
            self.has_begun = False
            self._lock.close()

    def write_report(self, how: str) -> str:
        """Write the report of what there is, and return the line of `end`."""
        return f"{how}; {self._report()}"

    def _report(self) -> str:
        logs = self.folder / LOGS_FOLDER
        if not (logs / METRICS_FILE).is_file():
            return f"no step was finished, so there is no report in {self.folder}"
        try:
            with require_extra():
                from rl_training.records.report import write_report  # here: attach alone needs no extra

                return f"the report: {write_report(self.folder)}"
        except Exception as error:  # whatever it is, it must not hide how training has ended
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            return (
                f"the records are in {logs}; the report could not be written ({why}): rl-training report {self.folder}"
            )


def holds_another_run(folder: Path) -> bool:
    """Return whether a training has left records in a folder, or something else a config.yaml."""
    logs = folder / LOGS_FOLDER
    recorded = any((logs / name).is_file() and (logs / name).stat().st_size for name in (METRICS_FILE, PROBES_FILE))
    return recorded or ((folder / CONFIG_FILE).exists() and not is_of_attached_run(folder))
