"""The settings of a run, as its config.yaml has them, and changes to them in the words of train.py.

A config.yaml that an earlier version has written is read as it would be written today. On offline.py's command line
the changes stand beside its own settings: `gather_run_settings` puts them into one list, `run=[…]`, which Hydra hands
on, and `run_settings` applies that list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rl_training.job.explain import GONE, as_text, did_you_mean, differences, flat, load_plain
from rl_training.job.settings import SAME_AS, value_of
from rl_training.job.shipped import CONF
from rl_training.records.folder import CONFIG_FILE, NOT_OF_TRAINING, TRAINING_STATE
from rl_training.records.provenance import without_secrets

UNLISTED = ("trainer.", "model.dtype")  # any field of DrGRPOConfig; every loader of a model takes a dtype
NEEDED = ("seed", "batch", "trainer", "model", "adapter", "data", "buffer", "probes")  # of build_restored
ITS_OWN = ("run_dir", "resume", "branch", "additional_steps")
KEPT = ("model.", "adapter.", "data.", "trainer.optim")
MOVED = {
    "rl_training.models.": "rl_training.tasks.models.",
    "rl_training.buffer.": "rl_training.hosts.trl.buffer.",
    "rl_training.live.buffer.": "rl_training.hosts.trl.buffer.",
}

INTERVENTIONS = (
    "interventions are not measured at a checkpoint any more: a branch from it measures them: rl-training train "
    "branch=CHECKPOINT additional_steps=4 'probe=[simple,interventions]' probes.interventions.every=1"
)


def gather_run_settings(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with all settings that conf/offline.yaml lacks collected in one list, `run`.

    Example: ["checkpoint=R", "trainer.beta=0"] becomes ["checkpoint=R", 'run=["trainer.beta=0"]'].
    ValueError for what earlier versions had, saying what to use.
    """
    if any(word.startswith(("interventions=", "interventions.")) for word in arguments):
        raise ValueError(INTERVENTIONS)
    own = load_plain(CONF / "offline.yaml")
    of_run = [
        word
        for word in arguments
        if "=" in word and not word.startswith("-") and re.split(r"[.=]", word.lstrip("+~"))[0] not in own
    ]
    if not of_run:
        return list(arguments)
    choices = product(*map(_choices, of_run))  # of a sweep; one, where nothing is swept
    lists = (f"[{','.join(map(as_text, chosen))}]" for chosen in choices)
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


def run_settings(checkpoint: Path, changes: Sequence[str]) -> DictConfig:
    """Returns the configuration of the run that a checkpoint belongs to, with these changes.

    For a checkpoint outside of a run it is train.yaml's with these changes, which then name model and data.

    Raises ValueError for a setting that there is not, and where model or data are not named.
    """
    stored = checkpoint.resolve().parents[1] / CONFIG_FILE
    if not stored.is_file():
        chosen = {change.partition("=")[0] for change in changes}
        missing = [f"{group}=…" for group in ("model", "data") if group not in chosen]
        if missing:
            raise ValueError(
                f"{checkpoint} is not in a run (there is no {stored}): give {' '.join(missing)}, and adapter=lora if "
                "it is an adapter; see --help"
            )
        return compose("train", overrides=[f"++{word}" if word.startswith(UNLISTED) else word for word in changes])
    cfg = load_settings(stored)
    for change in _parsed(changes):
        key, value = change.key_or_group, change.value()
        if (CONF / key).is_dir():
            cfg[key] = compose("train", overrides=[change.input_line or ""])[key]
        elif not key.startswith(UNLISTED) and OmegaConf.select(cfg, key, default=None) is None:
            known = [*flat(OmegaConf.to_container(cfg)), *flat(load_plain(CONF / "offline.yaml"))]
            hint = did_you_mean(key, known)
            raise ValueError(f"{key}: neither the analysis nor the run in {stored.parent} has this setting{hint}")
        else:
            OmegaConf.update(cfg, key, value, force_add=True)
    missing = [key for key in NEEDED if key not in cfg]
    if missing:
        groups = [f"{key}=…" for key in missing if (CONF / key).is_dir()]
        give = f", or give {' '.join(groups)}" if len(groups) == len(missing) else ""
        raise ValueError(f"{stored} lacks {', '.join(missing)}, which a run needs: mend the file{give}")
    return cfg


def load_settings(path: Path) -> DictConfig:
    """Returns what a config.yaml holds: moved settings under their present names, without those that are gone.

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
    text = OmegaConf.to_yaml(settings)
    for before, now in MOVED.items():
        text = text.replace(f"_target_: {before}", f"_target_: {now}")
    return OmegaConf.create(text)  # type: ignore[return-value]


def refuse_other_settings(cfg: DictConfig, run_dir: Path) -> None:
    """Raises ValueError when a run would be resumed with other settings than it has: some of them would be ignored."""
    stored = run_dir / CONFIG_FILE
    if not stored.is_file():
        return
    try:
        started = load_settings(stored)
    except ValueError as error:
        raise ValueError(f"{error}; without it the settings are not compared") from error
    before, now = (
        {key: value for key, value in flat(without_secrets(c)).items() if not key.startswith(NOT_OF_TRAINING)}
        for c in (OmegaConf.to_container(started, resolve=True), OmegaConf.to_container(cfg, resolve=True))
    )
    if changed := differences(before, now):
        raise ValueError(
            f"resume: {run_dir} was started with other settings: {changed}. Give the same ones (its "
            f"{CONFIG_FILE} has them all), or start a new run from its weights: model=hub model.name=CHECKPOINT"
        )


def branched(cfg: DictConfig) -> DictConfig:
    """Returns the run's settings; for branch=CHECKPOINT, those of the run that it comes from, with the changes applied.

    Weights, optimizer, random numbers and position in the data are the checkpoint's: a branch without changes is its
    run bit for bit. ValueError where there is no such checkpoint, or where model, adapter or data would change.
    """
    if cfg.get("branch") is None:
        return cfg
    from rl_training.records.checkpoints import find_checkpoint  # imports torch: --help need not wait for it

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
