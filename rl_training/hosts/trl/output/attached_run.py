"""The folder of an attached training: its choice, its config.yaml, and the report at its end."""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.utils import logging

from rl_training.engine.probe import Probe
from rl_training.hosts.trl.output.destination import Destination
from rl_training.hosts.trl.output.end_request import EndRequest, end_process, request_of_process
from rl_training.hosts.trl.output.run_folder import RunFolder, on_main_process
from rl_training.hosts.trl.settings.recorded import settings_of_probes
from rl_training.parallel.ranks import all_ranks
from rl_training.records.claim import claim_folder
from rl_training.records.config import write_config
from rl_training.records.folder import LOGS_FOLDER, REPORT_FOLDER, refuse_a_file
from rl_training.records.json_values import plain_settings
from rl_training.records.provenance import provenance

logger = logging.get_logger(__name__)

ANOTHER_FOLDER_FIX = "give attach another folder"
TERMINATION = "the report is written when this step ends, and then the signal ends this process"
NO_REPORT = " before the report was written: rl-training report {folder} writes it, if a step has been logged"
MAKE_ROOM = "make room, then go on with trainer.train(resume_from_checkpoint=True)"


class AttachedRun(Destination):
    """The folder that a training writes to: the requested one, or the next free number.

    Args:
        requested: The folder as the user gave it.

    Raises:
        UserError: If a file is in the way.
    """

    has_own_folders = True

    def __init__(self, requested: str | Path) -> None:
        self._requested = Path(requested).expanduser()
        if not self._requested.name:  # "." has no name to append a number to
            self._requested = self._requested.absolute()
        for path in (self._requested, self._requested / LOGS_FOLDER, self._requested / REPORT_FOLDER):
            refuse_a_file(path)
        self._written = self._requested
        self._working_folder = Path.cwd()  # in which the requested folder lies if it is relative
        self._end_of_training = contextlib.ExitStack()  # unlocks the folder
        self._end_of_listening = contextlib.ExitStack()
        self._request: EndRequest | None = None  # None if SIGTERM is not handled here
        self._is_agreed = False  # whether all ranks know that SIGTERM has arrived on some of them

    @property
    def folder(self) -> Path:  # type: ignore[override]
        """The requested folder, and from the beginning of a training the one it writes to.

        As the user gave it, but absolute once the working directory has changed: a reward function may do that.
        """
        with contextlib.suppress(OSError):  # the working directory may have been removed
            if Path.cwd() == self._working_folder:
                return self._written
        return self._working_folder / self._written

    @property
    def output(self) -> Path:
        return self.folder

    def begin(self, run_id: str) -> str:
        self.has_report = False
        folder, own_id = on_main_process(lambda: self._claim_folder(run_id))
        self._written = Path(folder)
        if all_ranks().number == 0:
            self.records = self._run.records()
        self._listen()
        return own_id

    def _listen(self) -> None:
        """Let SIGTERM wait for the report, on every rank: else a rank that has ended would hold up the first one.

        A handler of the user's own stays: what it does, the end of training or of its `with` block reports.
        """
        self._request = request_of_process(signal.SIGTERM)
        if self._request is None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            no_report = NO_REPORT.format(folder=shlex.quote(str(self.folder)))
            self._request = EndRequest([signal.SIGTERM], TERMINATION, loss=no_report, ends_forks=True)
            self._end_of_listening.enter_context(self._request.listening())

    @property
    def is_told_to_end(self) -> bool:
        is_told_here = self._request is not None and self._request.signum != 0
        return is_told_here or self._is_agreed

    def agree_to_end(self) -> bool:
        ranks = all_ranks()
        if ranks.count > 1:
            self._is_agreed = ranks.total(self.is_told_to_end, PartialState().device) > 0
        return self.is_told_to_end

    def obey_signal(self) -> None:
        self._end_of_listening.close()  # a rank that waits below runs no handler: a second signal ends it at once
        if self._is_agreed:
            # A launcher sends a second signal to the first rank, which writes the report, once another has ended.
            with contextlib.suppress(RuntimeError):  # perhaps that has ended
                PartialState().wait_for_everyone()
        if self.is_told_to_end:
            end_process(signal.SIGTERM)

    def _claim_folder(self, run_id: str) -> tuple[str, str]:
        self._written = self._requested
        claim = claim_folder(self.folder, run_id, ANOTHER_FOLDER_FIX)
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
        with self._end_of_training:
            line = self._run.closing_line(how) if all_ranks().number == 0 else ""
        self.has_report = True
        return line
