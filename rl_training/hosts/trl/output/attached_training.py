"""What one training writes, from its call of `train()` until the line that says how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl import announcements
from rl_training.hosts.trl.guard import Guard
from rl_training.hosts.trl.output.destination import Destination
from rl_training.hosts.trl.trainer_log import TrainerLog

logger = logging.get_logger(__name__)


class AttachedTraining:
    """One training of a trainer: what it writes while it is `running`, where it begins, and at `finish`.

    Args:
        trainer: The trainer.
        destination: Where its trainings write.
        writer: Writes the estimates.
        log: Writes the lines of metrics.jsonl.
        guard: Catches errors of the measuring code.

    Attributes:
        has_run: Whether `train()` was called.
    """

    def __init__(
        self, trainer: GRPOTrainer, destination: Destination, writer: EstimateWriter, log: TrainerLog, guard: Guard
    ) -> None:
        self._trainer, self._destination, self._writer = trainer, destination, writer
        self._log, self._guard = log, guard
        self.has_run = False
        self._failed = ""  # how it failed; its error may have been caught inside the `with` block

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Surround `train()`. Whatever ends it, the line of its last step is written."""
        self.has_run = True
        self._guard.begin()
        try:
            with contextlib.ExitStack() as written:
                written.callback(self._destination.trained)
                written.callback(self._log.flush)
                yield
        except BaseException as error:
            self._failed = announcements.how_it_ended(self._trainer, error)
            self._destination.note_interrupt(error)
            raise

    def begin(self, run_id: str) -> str:
        """Choose and lock the folder to write to, and return the id of the training, as `Destination.begin`."""
        own_id = self._destination.begin(run_id, self._flush)
        self._writer.records = self._destination.records
        return own_id

    def begin_records(self, after_step: int, settings: Mapping[str, Any]) -> None:
        """Begin the records after a step, once it is known whether measuring has begun.

        Args:
            after_step: The step. 0 for a new training.
            settings: The settings that affect training.
        """
        records = self._writer.records
        if records is None:
            return
        with self._guard.watching(refuses=True):
            records.start(after_step, settings, has_failed=bool(self._guard.reason))
        records.on_write_error = self._guard.leave_out

    def finish(self, error: BaseException | None) -> None:
        """Write what is left, then the report, and unlock the folder, even if the disk is full. Once for a training.

        Args:
            error: The error that ends the training or its `with` block.
        """
        try:
            self._log.flush()
        finally:
            if self._writer.records is not None:
                self._writer.records.on_write_error = None
            how = self._failed or announcements.how_it_ended(self._trainer, error)
            if line := self._destination.end(self._guard.outcome(how)):
                self._show_closing_line(line, error)

    def _show_closing_line(self, line: str, error: BaseException | None) -> None:
        """Say how training ended and where the report is: in the log, and below the traceback of an error."""
        line += announcements.how_to_resume(self._trainer) if self._failed else ""
        logger.warning(line)
        if error is not None:
            error.add_note(line)

    def _flush(self) -> str:
        """Write what is left, because SIGTERM arrived, and return how training ended. It may still go on."""
        self._log.flush()
        return self._guard.outcome(announcements.how_it_ended(self._trainer, "was told to end (SIGTERM)"))
