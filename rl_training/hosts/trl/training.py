"""One training of a trainer: what is known of it from its call of `train()` until the line that says how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.hosts.trl.output.destination import Destination
from rl_training.hosts.trl.output.unwritten_lines import UnwrittenLines


@dataclass(frozen=True)
class Resumed:
    """What a training resumes: contents of a checkpoint, or nothing."""

    run_id: str = ""  # id of the training that the checkpoint belongs to; "" if it has none
    states: Mapping[str, Any] | None = None  # states of the probes, by name; None without a checkpoint


class Training:
    """One training. TrainingCallback makes it when `train()` is called, for all that measure, log or save.

    Attributes:
        step: The number of the current step. 0 before the first one.
        resumed: What it resumes, from when its checkpoint is loaded.
        run_id: Its id, which is written to its checkpoints. "" until its folder is locked, and if it has none.
        measuring_ended: Why measuring ended before training did, in words. "" while it has not.
        early_error: The error that ended measuring before the records began, until it is written.
        has_warned_again: Whether a further error, after the one that ended measuring, was told.
        failure: How training failed, in words; its error may be caught inside a `with` block. "" if it has not.
    """

    def __init__(self) -> None:
        self.step = 0
        self.resumed = Resumed()
        self.run_id = ""
        self.measuring_ended = ""
        self.early_error: Exception | None = None
        self.has_warned_again = False
        self.failure = ""
        self._output: Destination | None = None  # while its folder is locked for it
        self._unwritten = UnwrittenLines()

    @property
    def output(self) -> Destination | None:
        """Where it writes. None until its folder is locked, and once it has ended."""
        return self._output

    def begin_output(self, destination: Destination) -> None:
        """Choose and lock the folder to write to. Collective.

        Raises:
            UserError: On all ranks, if the folder cannot be written to.
        """
        self.run_id = destination.begin(self.resumed.run_id)
        self._output = destination

    def begin_records(self, after_step: int, settings: Mapping[str, Any]) -> None:
        """Begin the records after a step, once it is known whether measuring has begun.

        Args:
            after_step: The step. 0 for a new training.
            settings: The settings that affect training.
        """
        records = None if self._output is None else self._output.records
        if records is not None:
            records.start(after_step, settings, has_failed=bool(self.measuring_ended))
            records.on_write_error = self._leave_out

    def _leave_out(self, path: Path, error: OSError) -> None:
        """Go on without lines of the records that cannot be written."""
        self._unwritten.add(self.step, path, error)

    def end(self, how: str) -> str:
        """Write the report, and unlock the folder, even if the disk is full.

        Args:
            how: How training ended, in words, if it has not failed.

        Returns:
            A line: how training ended, why measuring ended before it, what the records lack, and where the report is
            or why there is none. Empty if no report is due: on the other ranks, without a locked folder, and after a
            second call.
        """
        output, self._output = self._output, None
        if output is None:
            return ""
        if output.records is not None:
            output.records.on_write_error = None
        known = (self.failure or how, self.measuring_ended, str(self._unwritten))
        return output.end("; ".join(filter(None, known)))
