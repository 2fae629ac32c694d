"""The error that has ended the measuring of a training, which went on without it: logs/probe_error.txt.

Its first line says what happened at which step, the rest is the traceback.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.masking import mask_line
from rl_training.records.files.stored_yaml import read_text
from rl_training.records.folder import LOGS_FOLDER

FAILURE_FILE = "probe_error.txt"


def write_failure(logs: Path, sentence: str, error: BaseException) -> None:
    """Write the sentence, on one line, and the traceback of the error below it, secrets masked."""
    lines = [sentence, "", *"".join(traceback.format_exception(error)).splitlines()]
    text = "\n".join(mask_line(line) for line in lines) + "\n"
    write_atomically({logs / FAILURE_FILE: text.encode(errors="replace")})


def read_failure(run: Path) -> str:
    """Return the sentence that says why the measuring of a run has ended; "" where it has not."""
    path = run / LOGS_FOLDER / FAILURE_FILE
    return read_text(path).partition("\n")[0] if path.is_file() else ""
