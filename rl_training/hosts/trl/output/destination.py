"""Where an attached training writes: nowhere, or to records without a report. attached_run.py has the run folder.

A training calls `begin` when it begins. `trained` is called when `train()` returns or raises. If `begin` has succeeded,
`end` is called once, when all that is left is written: after `trained`, or at the end of a `with` block. All of them
are called on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training.engine.probe import Probe
from rl_training.hosts.interrupt_note import note_interrupt
from rl_training.hosts.trl.output.run_folder import on_main_process
from rl_training.parallel.ranks import all_ranks
from rl_training.records.claim import RecordsClaim
from rl_training.records.writer import Records


class Destination:
    """Writes nothing. Its subclasses write to records, or to the folder of a run.

    Attributes:
        records: What this rank writes to. None if it writes nothing.
        folder: The run folder: first the requested one, and from the beginning of a training the one it writes to. None
            if there is none.
        has_own_folders: Whether each training of the trainer gets a folder of its own.
        has_report: Whether the latest training has ended with a report.
    """

    records: Records | None = None
    folder: Path | None = None
    has_own_folders = False
    has_report = False

    @property
    def output(self) -> Path | None:
        """The folder that is announced when training begins."""
        return None

    def begin(self, run_id: str) -> str:
        """Choose the folder to write to, and lock it. Collective.

        Args:
            run_id: The id of the training that the checkpoint belongs to from which training resumes. "" for a new
                training. Neither writes to another training's folder.

        Returns:
            The id of the training. "" if it has none.

        Raises:
            UserError: On all ranks, if the folder cannot be written to.
        """
        return on_main_process(lambda: self._claim(run_id))  # on all ranks: perhaps only rank 0 was given records

    def _claim(self, run_id: str) -> str:
        return ""

    def write_config(self, settings: Mapping[str, Any], probes: Sequence[Probe]) -> None:
        """Write the settings of the training and its probes, if a report is to follow."""

    def trained(self) -> None:
        """Unlock what must not stay locked until `end`."""

    def end(self, how: str) -> str:
        """Write the report, and unlock the folder.

        Args:
            how: How training ended, in words.

        Returns:
            A line with `how` and the report's location, or the reason why there is none. Empty if no report is due:
            on the other ranks.
        """
        return ""

    @property
    def is_told_to_end(self) -> bool:
        """Whether this process is to end by SIGTERM once the report is written."""
        return False

    def agree_to_end(self) -> bool:
        """Return whether a SIGTERM has arrived on any rank, by which all of them are then to end. Collective.

        A rank that ended by itself would leave the others waiting for it.
        """
        return False

    def obey_signal(self) -> None:
        """End the process by SIGTERM if it is to end. A later one ends it at once. Called last, after `end`.

        Collective if the ranks have agreed to end.
        """

    def note_interrupt(self, error: BaseException | None) -> None:
        """Add a note to a KeyboardInterrupt that says where the measurements are, if no line of `end` says it."""


class _RecordsAlone(Destination):
    """Writes records, without config.yaml and report."""

    def __init__(self, records: Records) -> None:
        self.records = records if all_ranks().number == 0 else None

    @property
    def output(self) -> Path | None:
        return None if self.records is None else self.records.folder


class LockedRecords(_RecordsAlone):
    """Writes to the folder of a command, which has chosen and locked it, and which writes config.yaml and report."""


class BareRecords(_RecordsAlone):
    """Writes to a folder that is chosen and locked here, while the trainer trains."""

    def __init__(self, records: Records) -> None:
        super().__init__(records)
        self._records_claim = RecordsClaim(records)

    def _claim(self, run_id: str) -> str:
        return self._records_claim.begin(run_id)

    def trained(self) -> None:
        self._records_claim.release()

    def note_interrupt(self, error: BaseException | None) -> None:
        note_interrupt(error, self.records)


def destination_of(records: Records | None, is_locked: bool = False) -> Destination:
    """Return the destination of a training that writes these records and has no run folder.

    Args:
        records: The records. None writes nothing.
        is_locked: Whether a command has locked their folder.
    """
    if records is None:
        return Destination()
    return LockedRecords(records) if is_locked else BareRecords(records)
