"""config.yaml: the settings of a run, written here and nowhere else.

Of a run whose trainer is the user's own it has settings to read and compare, of which nothing can be made.
"""

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

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Quote also a text that only OmegaConf, which reads the file, takes for a number: 1e-3."""
        try:
            float(data)
        except ValueError:
            return super().represent_str(data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="'")


_Plain.add_representer(str, _Plain.represent_str)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with secrets masked, in which values of kinds that JSON does not have are text."""
    plain = to_json(without_secrets(dict(settings)), infinite_as_text=True)
    return dict(json.loads(json.dumps(plain, default=str)))


def write_config(folder: Path, settings: Mapping[str, Any], first_line: str = "", fix: str = MAKE_ROOM) -> None:
    """Write the settings of a run into its folder, whole or not at all.

    Args:
        settings: Values that YAML has, secrets masked.
        first_line: A comment, with FIRST_LINE that of an attached run.
        fix: What to do where the file cannot be written.
    """
    text = yaml.dump(settings, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
    write_atomically({folder / CONFIG_FILE: (first_line + text).encode()}, fix)


def is_of_attached_run(folder: Path) -> bool:
    """Return whether the config.yaml in a folder is one of an attached run."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.readline(len(FIRST_LINE) + 1) == FIRST_LINE.encode()
