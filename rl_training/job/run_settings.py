"""The settings of a run, as its config.yaml has them, and changes to them in the words of train.py.

On offline.py's command line they stand beside its own: `gather_run_settings` puts them into one list, `run=[…]`, which
Hydra hands on, and `run_settings` applies that list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rl_training.job.explain import did_you_mean
from rl_training.job.shipped import CONF
from rl_training.job.stored_settings import load_settings
from rl_training.records.folder import CONFIG_FILE

UNLISTED = ("trainer.", "model.dtype")  # any field of DrGRPOConfig; every loader of a model takes a dtype
INTERVENTIONS = re.compile(r"^interventions=")  # short for the list of them
NEEDED = ("seed", "batch", "trainer", "model", "adapter", "data", "buffer", "probes")  # of build_restored


def gather_run_settings(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with all settings that conf/offline.yaml lacks collected in one list, `run`.

    Example: ["checkpoint=R", "trainer.beta=0"] becomes ["checkpoint=R", 'run=["trainer.beta=0"]'].
    `interventions=all` is written out: interventions.which=all.
    """
    arguments = [INTERVENTIONS.sub(r"interventions.which=", word) for word in arguments]
    own = {str(key) for key in OmegaConf.load(CONF / "offline.yaml")}
    of_run = [
        word for word in arguments if "=" in word and word.lstrip("+~-").partition("=")[0].split(".")[0] not in own
    ]
    of_run = [word for word in of_run if not word.startswith("-")]
    if not of_run:
        return list(arguments)
    choices = product(*map(_choices, of_run))  # of a sweep; one, where nothing is swept
    lists = (f"[{','.join(map(_quoted, chosen))}]" for chosen in choices)
    return [*(word for word in arguments if word not in of_run), f"run={','.join(lists)}"]


def name_each_job(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a multirun with a name for each of its analyses, which would otherwise share a folder.

    Example: ["-m", "update.seed=1,2"] gets 'name="default,update.seed=${update.seed}"'. A name that is given stays.
    """
    words = [word for word in arguments if "=" in word and not word.startswith("-")]
    if not {"-m", "--multirun"} & set(arguments) or any(word.startswith("name=") for word in words):
        return list(arguments)
    try:
        swept = [change.key_or_group for change in _parsed(words) if change.is_sweep_override()]
    except HydraException:  # Hydra itself will say what it cannot read
        return list(arguments)
    apart = [key for key in swept if key != "checkpoint"]  # checkpoints have a folder each
    values = (f"{key}=${{{key}}}" if key != "run" else "${run}" for key in apart)
    return [*arguments, f'name="{",".join(["default", *values])}"'] if apart else list(arguments)


def _choices(word: str) -> list[str]:
    """Returns the settings that a swept one stands for: a=1,2 is a=1 and a=2."""
    try:
        (change,) = _parsed([word])
    except HydraException:  # said once the run is known that it is to change
        return [word.lstrip("+")]
    if not change.is_sweep_override():
        return [word.lstrip("+")]
    return [f"{change.key_or_group}={value}" for value in change.sweep_string_iterator()]


def _parsed(words: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(words))


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def run_settings(checkpoint: Path, changes: Sequence[str]) -> DictConfig:
    """Returns the configuration of the run that a checkpoint belongs to, with these changes.

    For a checkpoint outside of a run it is train.yaml's with these changes, which then name model and data.

    Raises ValueError for a setting that there is not, and where model or data are not named.
    """
    stored = checkpoint.resolve().parents[1] / CONFIG_FILE
    if not stored.is_file():
        chosen = {change.partition("=")[0] for change in changes}
        missing = [group for group in ("model", "data") if group not in chosen]
        if missing:
            raise ValueError(
                f"{checkpoint} is not in a run (there is no {stored}): give "
                f"{' '.join(f'{group}=…' for group in missing)}, and adapter=lora if it is an adapter; see --help"
            )
        return compose("train", overrides=[_unlisted(change) for change in changes])
    cfg = load_settings(stored)
    for change in _parsed(changes):
        key, value = change.key_or_group, change.value()
        if (CONF / key).is_dir():
            cfg[key] = compose("train", overrides=[change.input_line or ""])[key]
        elif not key.startswith(UNLISTED) and OmegaConf.select(cfg, key, default=None) is None:
            known = _keys(cfg)
            hint = did_you_mean(key, known)
            raise ValueError(f"{key}: neither the analysis nor the run in {stored.parent} has this setting{hint}")
        else:
            OmegaConf.update(cfg, key, value, force_add=True)
    _refuse_missing(cfg, stored)
    return cfg


def _refuse_missing(cfg: DictConfig, stored: Path) -> None:
    """Raises ValueError where the run's config.yaml lacks what a trainer is made of."""
    missing = [key for key in NEEDED if key not in cfg]
    if missing:
        groups = [f"{key}=…" for key in missing if (CONF / key).is_dir()]
        give = f", or give {' '.join(groups)}" if groups == [f"{key}=…" for key in missing] else ""
        raise ValueError(f"{stored} lacks {', '.join(missing)}, which a run needs: mend the file{give}")


def _unlisted(change: str) -> str:
    """Returns the change as Hydra wants it: of some groups more can be set than their files list."""
    return f"++{change}" if change.startswith(UNLISTED) else change


def _keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    nested = {str(key): cfg.get(key) for key in cfg}
    below = [
        key for name, node in nested.items() if isinstance(node, DictConfig) for key in _keys(node, f"{prefix}{name}.")
    ]
    own = [str(key) for key in OmegaConf.load(CONF / "offline.yaml")] if not prefix else []
    return [*(f"{prefix}{name}" for name in nested), *below, *own]
