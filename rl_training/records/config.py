"""config.yaml of a run whose trainer is the user's own: settings to read and compare, of which nothing can be made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.masking import without_secrets
from rl_training.records.folder import CONFIG_FILE
from rl_training.records.jsonl import MAKE_ROOM, to_json

FIRST_LINE = "# Settings of a training that rl_training.attach has measured: the trainer was made by a script.\n"


class _Plain(yaml.SafeDumper):
    """A dumper that writes no anchors, which are refused where a config.yaml is read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with secrets masked, in which values of kinds that JSON does not have are text."""
    plain = to_json(without_secrets(dict(settings)), infinite_as_text=True)
    return dict(json.loads(json.dumps(plain, default=str)))


def write_config(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of an attached training into its folder, secrets masked, whole or not at all."""
    text = yaml.dump(plain_settings(settings), Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
    write_atomically({folder / CONFIG_FILE: (FIRST_LINE + text).encode()}, MAKE_ROOM)


def is_of_attached_run(folder: Path) -> bool:
    """Return whether the config.yaml in a folder is one that `write_config` has written."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.readline(len(FIRST_LINE) + 1) == FIRST_LINE.encode()
