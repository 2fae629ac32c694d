"""A run's config.yaml, with secrets masked: as text for people, and as settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rl_training.limited_files import read_text
from rl_training.records.files.masking import without_secrets
from rl_training.records.files.stored_yaml import read_mapping
from rl_training.records.folder import CONFIG_FILE


def read_config(folder: Path) -> str | None:
    """Return the text of a run's config.yaml for people, with secrets masked; None if there is none."""
    config = folder / CONFIG_FILE
    if not config.is_file():
        return None
    settings = read_mapping(config)
    masked = without_secrets(settings)
    as_it_stands = read_text(config)
    return as_it_stands if masked == settings else yaml.safe_dump(masked, sort_keys=False, allow_unicode=True)


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the content of a run's config.yaml with secrets masked; {} if there are no settings.

    Raises:
        UserError: If it cannot be read.
    """
    return without_secrets(read_mapping(folder / CONFIG_FILE))
