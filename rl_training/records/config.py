"""config.yaml: the settings of a run, a job's or an attached one's (made_by.py). Only this module writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.folder import CONFIG_FILE
from rl_training.records.writer import RESUME_FIX


class _Plain(yaml.SafeDumper):
    """A YAML dumper without anchors, because the reader of config.yaml refuses them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Quote also text such as 1e-3, which OmegaConf, unlike YAML, would read as a number."""
        try:
            float(data)
        except ValueError:
            return super().represent_str(data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="'")


_Plain.add_representer(str, _Plain.represent_str)


def write_config(folder: Path, settings: Mapping[str, Any], fix: str = RESUME_FIX) -> None:
    """Write the settings of a run into its folder, atomically.

    Args:
        settings: Plain YAML values, with secrets already masked.
        fix: What the error tells the user to do if the file cannot be written.
    """
    text = yaml.dump(settings, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
    write_atomically({folder / CONFIG_FILE: text.encode()}, fix)
