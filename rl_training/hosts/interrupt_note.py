"""Says below the traceback of Ctrl-C where the measurements are, for records without a report."""

from __future__ import annotations

from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.writer import Records


def note_interrupt(error: BaseException | None, records: Records | None) -> None:
    """Add a note to a KeyboardInterrupt, shown below its traceback, that says once where the measurements are.

    Args:
        error: The exception that ended training, if any. Any other stays unchanged.
        records: The records on this rank. None: nothing is noted.
    """
    if not isinstance(error, KeyboardInterrupt) or records is None:
        return
    folder = records.folder
    if not (folder / METRICS_FILE).is_file():
        note = f"interrupted before a step was logged: {folder} holds no numbers"
    else:
        note = f"what was measured until then is in {folder}"
        if folder.name == LOGS_FOLDER:
            note += f"; the report of it: rl-training report {folder.parent}, or write_report({str(folder.parent)!r})"
    if note not in getattr(error, "__notes__", []):  # the end of a `with` block follows that of its training
        error.add_note(note)
