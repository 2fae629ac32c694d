"""The config.yaml of a run as it would be written today.

Moved settings have their present names; removed ones are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from rl_training.records.folder import CONFIG_FILE, NOT_OF_TRAINING
from rl_training.records.masking import without_secrets

MOVED = {
    "rl_training.models.": "rl_training.tasks.models.",
    "rl_training.buffer.": "rl_training.hosts.trl.buffer.",
    "rl_training.live.buffer.": "rl_training.hosts.trl.buffer.",
}
GONE = {  # settings, and what to do instead
    "alert.within_steps": "it looks 20 steps ahead for a level in nats, give alert.below=0.05",
    "probes.simple.estimator": "'score' needs sixteen times the sequences, leave it out",
    "probes.gns.lags": "what persists of the gradient is no longer measured, leave it out",
    "probes.simple.draw": "it was not better than the first responses of each prompt, leave it out",
    "probes.simple.prompt_share": "fewer prompts were not better, leave it out",
    "probes.simple.split_error": "give probe=[simple,error_shares]",
    "probes.simple.top_responses": "give probe=[simple,responses] probes.responses.count=3",
    "probes.simple.validate_every": "give probe=[simple,ground_truth] probes.ground_truth.every=10",
    "probes.simple.validate_sequences": "give probe=[simple,ground_truth] probes.ground_truth.sequences=512",
    "probes.simple.seed": "give probe=[simple,ground_truth] probes.ground_truth.seed=0",
}


def load_settings(path: Path) -> DictConfig:
    """Returns what a config.yaml holds, also one that an earlier version of the package has written.

    Raises ValueError where it cannot be read, or holds no settings.
    """
    try:
        settings = OmegaConf.load(path)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())}): mend or delete it") from error
    if not isinstance(settings, DictConfig):
        raise ValueError(f"{path} holds no settings: mend or delete it")
    for key in GONE:
        above, _, name = key.rpartition(".")
        node = OmegaConf.select(settings, above)
        if isinstance(node, DictConfig):
            node.pop(name, None)
    return OmegaConf.create(_named_as_today(OmegaConf.to_container(settings)))


def _named_as_today(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _place(value) if key == "_target_" else _named_as_today(value) for key, value in node.items()}
    return [_named_as_today(value) for value in node] if isinstance(node, list) else node


def _place(target: str) -> str:
    for before, now in MOVED.items():
        if target.startswith(before):
            return now + target.removeprefix(before)
    return target


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
