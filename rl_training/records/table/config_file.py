"""A run's settings, with secrets masked: config.yaml as text for people, and the settings of any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rl_training.records.files.limited import read_text
from rl_training.records.files.masking import without_secrets
from rl_training.records.files.stored_yaml import read_mapping
from rl_training.records.folder import CONFIG_FILE
from rl_training.records.jsonl import read_settings


def read_config(folder: Path) -> str | None:
    """Return the text of a run's config.yaml for people, with secrets masked; None if there is none."""
    config = folder / CONFIG_FILE
    if not config.is_file():
        return None
    settings = read_mapping(config)
    safe = without_secrets(settings)
    as_it_stands = read_text(config)
    return as_it_stands if safe == settings else yaml.safe_dump(safe, sort_keys=False, allow_unicode=True)


def settings_of_run(folder: Path) -> dict[str, Any]:
    """Return the settings of a run with secrets masked: from config.yaml, or else from logs/settings.json.

    {} if it has neither. Raises UserError if one cannot be read.
    """
    return without_secrets(read_mapping(folder / CONFIG_FILE)) or read_settings(folder)
