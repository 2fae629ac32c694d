"""logs/probe_error.txt: the error that ended the measuring of a run. The training itself went on.

The first line says what happened, and at which step. The traceback follows.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.limited import read_text
from rl_training.records.files.masking import mask_line
from rl_training.records.folder import LOGS_FOLDER

FAILURE_FILE = "probe_error.txt"


def write_failure(logs: Path, sentence: str, error: BaseException) -> None:
    """Write the sentence on one line and the error's traceback below it, with secrets masked."""
    lines = [sentence, "", *"".join(traceback.format_exception(error)).splitlines()]
    text = "\n".join(mask_line(line) for line in lines) + "\n"
    write_atomically({logs / FAILURE_FILE: text.encode(errors="replace")})


def read_failure(run: Path) -> str:
    """Return the sentence that says why measuring ended, or "" if it did not."""
    path = run / LOGS_FOLDER / FAILURE_FILE
    return read_text(path).partition("\n")[0] if path.is_file() else ""
