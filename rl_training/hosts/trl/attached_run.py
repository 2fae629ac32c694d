"""The folder of an attached training: its choice, its config.yaml, and the report at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from rl_training.hosts.trl.run_folder import RunFolder, on_main_process
from rl_training.parallel.ranks import all_ranks
from rl_training.records.claim import claim_folder
from rl_training.records.config import write_config
from rl_training.records.folder import LOGS_FOLDER, REPORT_FOLDER, refuse_a_file
from rl_training.records.json_values import plain_settings

logger = logging.get_logger(__name__)

ANOTHER_FOLDER_FIX = "give attach another folder"


class AttachedRun(RunFolder):
    """The folder that a training writes to: the requested one, or the next free number.

    `requested` is the one that the user gave; `folder` is the one written to, once training has begun.

    Args:
        requested: The folder as the user gave it.
    """

    make_room = "make room, then go on with trainer.train(resume_from_checkpoint=True)"

    def __init__(self, requested: str | Path) -> None:
        self.requested = Path(requested).expanduser()
        if not self.requested.name:  # "." has no name to append a number to
            self.requested = self.requested.absolute()
        for path in (self.requested, self.requested / LOGS_FOLDER, self.requested / REPORT_FOLDER):
            refuse_a_file(path)
        super().__init__(self.requested)
        self.has_begun = False
        self.run_id = ""

    def begin(self, run_id: str) -> None:
        """Choose the folder to write to, and lock it. Collective.

        Args:
            run_id: The id of the training that the checkpoint belongs to from which training resumes. "" for a new
                training. Neither writes to another training's folder.

        Raises:
            UserError: On all ranks, if the folder cannot be written to.
        """
        self.release()  # the folder of an earlier training in the same `with` block
        folder, self.run_id = on_main_process(lambda: self._claim(run_id))
        self.folder = Path(folder)
        self.has_begun = True

    def _claim(self, run_id: str) -> tuple[str, str]:
        claim = claim_folder(self.requested, run_id, ANOTHER_FOLDER_FIX)
        self._lock.push(claim.lock)
        if warning := claim.warning():
            logger.warning(warning)
        return str(claim.folder), claim.run_id

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Write config.yaml, with secrets masked."""
        write_config(self.folder, plain_settings(settings))

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
