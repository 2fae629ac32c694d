"""The folder of a run: its lock, records and report, for `attach` and for `rl-training train`.

The main process locks and writes it. If it cannot, all ranks raise the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from accelerate import PartialState

from rl_training.errors import UserError, require_extra
from rl_training.hosts.first_rank import on_first_rank
from rl_training.records.files.lock import locked
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.writer import Records

if TYPE_CHECKING:
    from rl_training.records.report import WrittenReport

Result = TypeVar("Result")


def on_main_process(work: Callable[[], Result]) -> Result:
    """Call a function on the main process, and return its result on all ranks. Collective.

    Raises:
        UserError: On all ranks, if the function raised one.
    """
    return on_first_rank(work, PartialState().device)  # which lets the processes join, if they have not yet


class RunFolder:
    """A folder that one training writes to at a time.

    Args:
        folder: The folder.
        make_room: What errors tell the user to do on a full disk.
    """

    def __init__(self, folder: Path, make_room: str = "make room, then go on with resume=latest") -> None:
        self.folder = folder
        self._make_room = make_room
        self._lock = contextlib.ExitStack()

    def lock(self, fix: str) -> None:
        """Lock the folder, until `release` or the end of this process. Call it on the main process only.

        Args:
            fix: What the user can do if it cannot be locked, for the error.

        Raises:
            UserError: If another process has locked it, or it cannot be written to.
        """
        self._lock.enter_context(locked(self.folder, fix))

    def release(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    def records(self, rollouts_every: int = 0) -> Records:
        """Return the records in the folder. `Records` documents `rollouts_every`."""
        return Records(self.folder / LOGS_FOLDER, rollouts_every, self._make_room)

    def write_report(self, pictures: str = "") -> WrittenReport:
        """Write the report, and return the paths of its files. Call it on the main process only.

        Args:
            pictures: Passed on to `write_report_files`.

        Raises:
            UserError: With the reason why there is no report, and where the records are.
        """
        logs = self.folder / LOGS_FOLDER
        if not (logs / METRICS_FILE).is_file():
            raise UserError(f"no step was finished, so there is no report in {self.folder}")
        try:
            with require_extra():
                # Here, because `attach` works without the extra.
                from rl_training.records.report import write_report_files

                return write_report_files(self.folder, pictures)
        except Exception as error:  # no error may hide how training ended
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"the records are in {logs}; the report could not be written ({why}): rl-training report {self.folder}"
            ) from error

    def closing_line(self, how: str) -> str:
        """Write the report, and return a line: how training ended, and where the report is or why there is none."""
        try:
            return f"{how}; the report: {self.write_report().page}"
        except UserError as error:
            return f"{how}; {error}"
