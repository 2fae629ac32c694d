"""branch=CHECKPOINT: a new run that goes on from a checkpoint of another, with other settings.

It has that run's settings, overridden by those given with `branch=`. Weights, optimizer, random numbers and position
in the data are the checkpoint's; model, adapter and data cannot change. A branch without overrides reproduces the run
that it comes from, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rl_training.job.run_settings import load_settings
from rl_training.job.settings import SAME_AS, value_of
from rl_training.job.shipped import CONF
from rl_training.job.values import differences, flat
from rl_training.records.checkpoints import find_checkpoint
from rl_training.records.folder import CONFIG_FILE, TRAINING_STATE

ITS_OWN = ("run_dir", "resume", "branch", "additional_steps")
KEPT = ("model.", "adapter.", "data.", "trainer.optim")


def branched(cfg: DictConfig) -> DictConfig:
    """Returns the run's settings; for a branch, those of the run that it comes from, with the changes applied.

    ValueError where there is no such checkpoint, or where model, adapter or data would change.
    """
    if cfg.get("branch") is None:
        return cfg
    checkpoint = find_checkpoint(str(Path(str(cfg.branch)).expanduser()), Path(), asked_by="branch").resolve()
    stored = checkpoint.parents[1] / CONFIG_FILE
    if checkpoint.parent.name != TRAINING_STATE or not stored.is_file():
        raise ValueError(
            f"branch={cfg.branch} is not in a run folder (RUN/{TRAINING_STATE}/checkpoint-N beside RUN/{CONFIG_FILE}): "
            "start a new run from its weights with model=hub model.name=CHECKPOINT"
        )
    settings = load_settings(stored)
    settings.pop("provenance", None)
    before = _kept(settings)
    for key in (key for key in cfg if key not in settings):  # a config.yaml may be older than a setting
        settings[key] = cfg[key]
    for key in _given(cfg):
        OmegaConf.update(settings, key, OmegaConf.select(cfg, key), merge=False, force_add=True)
    if changed := differences(before, _kept(settings)):
        raise ValueError(
            f"branch={checkpoint} would have {changed}: a branch keeps model, adapter, data and optimizer. Start a new "
            f"run from its weights with model=hub model.name={checkpoint}"
        )
    settings.branch = str(checkpoint)
    for name in SAME_AS:
        settings.trainer[name] = value_of(settings, name)
    return settings


def _kept(settings: DictConfig) -> dict[str, Any]:
    return {key: value for key, value in flat(settings).items() if key.startswith(KEPT)}


def _given(cfg: DictConfig) -> list[str]:
    """Returns the keys that were set on the command line: single ones, and the nodes that a group has filled."""
    plain, now = flat(compose("train")), flat(cfg)
    changed = [key for key in now if key not in plain or now[key] != plain[key]]
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    typed = [word.partition("=")[0].lstrip("+~") for word in overrides if "=" in word]
    groups = [key for key in typed if (CONF / key).is_dir()]
    nodes = [{"probe": "probes"}.get(key, key) for key in groups]
    single = [key for key in dict.fromkeys([*typed, *changed]) if key not in groups and not key.startswith("hydra")]
    return [*ITS_OWN, *(node for node in nodes if node in cfg and node != "trainer"), *single]
