"""The config.yaml of a run: read, and compared with the settings of a run that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from rl_training.records.folder import CONFIG_FILE, NOT_OF_TRAINING
from rl_training.records.masking import without_secrets


def load_settings(path: Path) -> DictConfig:
    """Returns what a config.yaml holds. Raises ValueError where it cannot be read, or holds no settings."""
    try:
        settings = OmegaConf.load(path)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())}): mend or delete it") from error
    if not isinstance(settings, DictConfig):
        raise ValueError(f"{path} holds no settings: mend or delete it")
    return settings


def refuse_other_settings(cfg: DictConfig, run_dir: Path) -> None:
    """Raises ValueError when a run would be resumed with other settings than it has: some of them would be ignored."""
    stored = run_dir / CONFIG_FILE
    if not stored.is_file():
        return
    try:
        started = load_settings(stored)
    except ValueError as error:
        raise ValueError(f"{error}; without it the settings are not compared") from error
    before, now = (flat(without_secrets(OmegaConf.to_container(c, resolve=True))) for c in (started, cfg))
    changed = [
        f"{key}={now.get(key)!r} (was {before.get(key)!r})"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(NOT_OF_TRAINING)
    ]
    if changed:
        raise ValueError(
            f"resume: {run_dir} was started with other settings: {', '.join(changed)}. Give the same ones (its "
            f"{CONFIG_FILE} has them all), or start a new run from its weights: model=hub model.name=CHECKPOINT"
        )


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of a nested configuration by their dotted keys."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    if not isinstance(node, Mapping):
        return {prefix.removesuffix("."): node}
    return {key: value for name in node for key, value in flat(node[name], f"{prefix}{name}.").items()}
