"""The folder of an attached training: its choice, its config.yaml, and the report at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers.utils import logging

from rl_training.engine.probe import Probe
from rl_training.hosts.trl.output.destination import Destination
from rl_training.hosts.trl.output.run_folder import RunFolder, on_main_process
from rl_training.hosts.trl.output.termination import Termination
from rl_training.hosts.trl.settings.recorded import settings_of_probes
from rl_training.parallel.ranks import all_ranks
from rl_training.records.claim import claim_folder
from rl_training.records.config import write_config
from rl_training.records.folder import LOGS_FOLDER, REPORT_FOLDER, refuse_a_file
from rl_training.records.json_values import plain_settings
from rl_training.records.provenance import provenance

logger = logging.get_logger(__name__)

ANOTHER_FOLDER_FIX = "give attach another folder"
MAKE_ROOM = "make room, then go on with trainer.train(resume_from_checkpoint=True)"


class AttachedRun(Destination):
    """The folder that a training writes to: the requested one, or the next free number.

    Args:
        requested: The folder as the user gave it.

    Raises:
        UserError: If a file is in the way.
    """

    folder: Path
    has_own_folders = True

    def __init__(self, requested: str | Path) -> None:
        self._requested = Path(requested).expanduser()
        if not self._requested.name:  # "." has no name to append a number to
            self._requested = self._requested.absolute()
        for path in (self._requested, self._requested / LOGS_FOLDER, self._requested / REPORT_FOLDER):
            refuse_a_file(path)
        self.folder = self._requested
        self._end_of_training = ExitStack()  # unlocks the folder and stops listening
        self._has_begun = False

    @property
    def output(self) -> Path:
        return self.folder

    def begin(self, run_id: str, flush: Callable[[], str]) -> str:
        folder, own_id = on_main_process(lambda: self._claim_folder(run_id))
        self.folder = Path(folder)
        self._has_begun = True
        self.has_report = False
        if all_ranks().number == 0:
            self.records = self._run.records()
            termination = Termination(lambda: logger.warning(self._run.closing_line(flush())))
            termination.listen()
            self._end_of_training.callback(termination.release)
        return own_id

    def _claim_folder(self, run_id: str) -> tuple[str, str]:
        claim = claim_folder(self._requested, run_id, ANOTHER_FOLDER_FIX)
        self._end_of_training.push(claim.lock)
        if warning := claim.warning():
            logger.warning(warning)
        return str(claim.folder), claim.run_id

    @property
    def _run(self) -> RunFolder:
        return RunFolder(self.folder, MAKE_ROOM)

    def write_config(self, settings: Mapping[str, Any], probes: Sequence[Probe]) -> None:
        """Write config.yaml, with secrets masked."""
        if all_ranks().number == 0:
            config = {**settings, "probes": settings_of_probes(probes), "provenance": provenance()}
            write_config(self.folder, plain_settings(config))

    def end(self, how: str) -> str:
        if not self._has_begun:
            return ""
        self._has_begun = False
        with self._end_of_training:
            line = self._run.closing_line(how) if all_ranks().number == 0 else ""
        self.has_report = True
        return line
