"""What made a run: `made_by` in its config.yaml or, without one, in its logs/settings.json.

Whoever writes settings records it. Only from a job's settings can a trainer be made again, and a report gives advice in
the words of whatever trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.records.files.stored_yaml import read_mapping
from rl_training.records.folder import CONFIG_FILE
from rl_training.records.jsonl import read_settings

MADE_BY = "made_by"  # name of the setting, whose values are:
JOB = "job"  # rl-training train
TRL = "trl"  # a TRL trainer with attached probes, made by a script
VERL = "verl"
LOOP = "loop"  # any other loop


def made_by(settings: Mapping[str, Any]) -> str:
    """Return JOB, TRL, VERL or LOOP, as recorded settings say; LOOP if they do not, as in records written by hand."""
    maker = settings.get(MADE_BY)
    return str(maker) if maker in (JOB, TRL, VERL) else LOOP


def is_of_attached_run(run: Path) -> bool:
    """Return whether a folder holds the settings of an attached run: readable, but no trainer can be made from them."""
    with contextlib.suppress(UserError):  # whoever needs settings that cannot be read says so
        return made_by(read_mapping(run / CONFIG_FILE) or read_settings(run)) == TRL
    return False
