"""The folder of an attached training: its choice, its config.yaml, and the report at its end."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from rl_training.hosts.trl.run_folder import RunFolder, on_main_process
from rl_training.parallel.ranks import all_ranks
from rl_training.records.config import FIRST_LINE, is_of_attached_run, write_config
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.lock import FolderInUse
from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER, REPORT_FOLDER, refuse_a_file
from rl_training.records.json_values import plain_settings
from rl_training.records.jsonl import METRICS_FILE, PROBES_FILE

logger = logging.get_logger(__name__)

ANOTHER_FOLDER_FIX = "give attach another folder"


class AttachedRun(RunFolder):
    """The folder that a training writes to: the requested one, or the next free number.

    `requested` is the one that the user gave; `folder` is the one written to, once training has begun.

    Args:
        requested: The folder as the user gave it.
    """

    def __init__(self, requested: str | Path) -> None:
        self.requested = Path(requested).expanduser()
        if not self.requested.name:  # "." has no name to append a number to
            self.requested = self.requested.absolute()
        for path in (self.requested, self.requested / LOGS_FOLDER, self.requested / REPORT_FOLDER):
            refuse_a_file(path)
        super().__init__(self.requested)
        self.has_begun = False

    def begin(self, run_name: str | None) -> None:
        """Choose the folder to write to, and lock it. Collective.

        Args:
            run_name: The name of the folder, as noted in the checkpoint that training resumes from. None for a new
                training, which never writes to another training's folder.

        Raises:
            UserError: On all ranks, if the folder cannot be written to.
        """
        self.release()  # the folder of an earlier training in the same `with` block
        self.folder = Path(on_main_process(lambda: str(self._lock_folder(run_name))))
        self.has_begun = True
        if all_ranks().number == 0 and run_name is None and self.folder != self.requested:
            logger.warning(f"{self.requested} holds another training, so this one is written to {self.folder}")

    def _lock_folder(self, run_name: str | None) -> Path:
        if run_name is None:
            return self._lock_free_folder()
        resumed_folder = self.requested.with_name(run_name) if run_name else self.requested
        self.folder = resumed_folder if resumed_folder.is_dir() else self.requested
        refuse_links_out(self.folder)
        self.lock(ANOTHER_FOLDER_FIX)
        return self.folder

    def _lock_free_folder(self) -> Path:
        for number in itertools.count(1):
            self.folder = self.requested if number == 1 else self.requested.with_name(f"{self.requested.name}-{number}")
            if holds_another_run(self.folder):
                continue
            with contextlib.suppress(FolderInUse):
                self.lock(ANOTHER_FOLDER_FIX)
                if not holds_another_run(self.folder):  # no other process has trained there meanwhile
                    return self.folder
                self.release()
        raise AssertionError("numbers do not end")

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Write config.yaml, with secrets masked."""
        write_config(self.folder, plain_settings(settings), FIRST_LINE)

    def end(self, how: str) -> str:
        """Write the report on the main process, and unlock the folder.

        Args:
            how: How training ended, in words.

        Returns:
            A line with `how` and the report's location, or the reason why there is none. Empty on other ranks.
        """
        try:
            return self.closing_line(how) if all_ranks().number == 0 else ""
        finally:
            self.has_begun = False
            self.release()


def holds_another_run(folder: Path) -> bool:
    """Return whether a folder holds the records of a training, or a config.yaml that `attach` did not write."""
    logs = folder / LOGS_FOLDER
    recorded = any((logs / name).is_file() and (logs / name).stat().st_size for name in (METRICS_FILE, PROBES_FILE))
    return recorded or ((folder / CONFIG_FILE).exists() and not is_of_attached_run(folder))
