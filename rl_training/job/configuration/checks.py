"""Checks the settings of train.py, offline.py and evaluate.py before anything is written.

Nothing here imports torch, so a mistyped value fails at once. Checks that need TRL's fields are in
objects/trainer_checks.py.
"""

from __future__ import annotations

import functools
import importlib.util
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rl_training.errors import EXTRA_OF, UserError, how_to_install
from rl_training.job.configuration.nested import load_plain
from rl_training.job.configuration.shipped import CONF
from rl_training.job.configuration.values import check_allowed, check_kinds
from rl_training.options import did_you_mean
from rl_training.records.folder import TRAINING_STATE
from rl_training.records.hydra_text import quote_list, quote_override

DERIVED_FIELDS = {
    "per_device_train_batch_size": "batch.microbatch_size",
    "seed": "seed",
    "output_dir": "run_dir",
}


def check_settings(cfg: DictConfig) -> None:
    """Raise UserError for settings that are out of range, do not exist, or contradict another setting."""
    if not isinstance(cfg.run_dir, str) or not cfg.run_dir.strip():
        raise UserError(f"run_dir={cfg.run_dir} is not a folder: give run_dir=PATH, or leave it out for a new one")
    check_kinds(cfg, {"batch": {}, "rollouts": {}, "logger": {}})  # their contents are checked below
    _check_probes(cfg.get("probes"))
    check_values(cfg, "train")
    check_paths(cfg, ("data.path", "model.name"))
    if cfg.model.get("quantization") and not cfg.adapter:
        raise UserError("4-bit weights cannot be trained: use adapter=qlora, or model.quantization=null")
    _check_trainer(cfg)


@functools.cache
def ranges(command: str) -> Mapping[str, Any]:
    """Return the allowed type and range of a command's settings, by key, from ranges.yaml."""
    return MappingProxyType(load_plain(Path(__file__).with_name("ranges.yaml"))[command])


def check_values(cfg: DictConfig, command: str) -> None:
    """Raise UserError for a setting that is required but unset, has another type than in conf/, or is out of range.

    Settings that are absent are not checked.
    """
    unset = sorted(OmegaConf.missing_keys(cfg))
    if unset:
        raise UserError(f"{unset[0]} is not set: give {unset[0]}=VALUE, see --help")
    check_kinds(cfg, load_plain(CONF / f"{command}.yaml"))
    for key, allowed in ranges(command).items():
        value = OmegaConf.select(cfg, key, default=...)
        if value is not ...:
            check_allowed(key, value, allowed)


def check_paths(cfg: DictConfig, keys: Iterable[str], lists: Collection[str] = ()) -> None:
    """Raise UserError for a setting that should be a path and is another value; those in `lists` may be lists of paths.

    Settings that are null or absent are not checked.
    """
    for key in keys:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, ListConfig) and key not in lists:
            raise UserError(f"{key}={value} must be one path; a sweep takes one after another, -m {key}=A,B")
        paths = value if isinstance(value, ListConfig) else [value]
        if not all(isinstance(path, str | None) for path in paths):
            typed = shlex.quote(f"{key}={quote_list([*map(str, paths)])}") if isinstance(value, ListConfig) else ""
            raise UserError(f"{key}={value} is not a path: quote it, {typed or quote_override(key, str(value))}")


def _check_probes(probes: Any) -> None:
    if isinstance(probes, str):
        raise UserError(choose_probes(probes))
    if not isinstance(probes, DictConfig):
        raise UserError("there is nothing in `probes`: for a run without probes give probe=none")
    for probe in map(str, probes):
        if not isinstance(probes[probe], DictConfig):
            raise UserError(f"probes.{probe}={probes[probe]}: to run without it, leave it out of the list 'probe=[…]'")
        file = CONF / "probe" / f"{probe}.yaml"
        if file.is_file():
            check_kinds(probes[probe], load_plain(file)[probe], f"probes.{probe}.")


def _check_trainer(cfg: DictConfig) -> None:
    """Raise UserError for values in cfg.trainer that come too late, cannot work, or are set by another setting."""
    if cfg.trainer.get("deepspeed"):
        raise UserError(  # the process group already exists when this is read, and training would use DDP
            "trainer.deepspeed comes too late: use accelerate launch --config_file launch/zero2.yaml, which names the "
            "DeepSpeed configuration"
        )
    if "gradient_accumulation_steps" in cfg.trainer:
        raise UserError(
            "trainer.gradient_accumulation_steps follows from the batch: set batch.sequences_per_step instead"
        )
    exact = cfg.model.get("dtype", "float32") == "float32" and not cfg.model.get("quantization")
    if cfg.trainer.get("use_vllm") and cfg.adapter and not exact:
        raise UserError(
            "for vLLM, TRL merges the adapter into the frozen weights and takes it out again at every step, and "
            "rounding erodes weights below fp32: use adapter=lora model.dtype=float32, or trainer.use_vllm=false"
        )
    if cfg.trainer.get("max_steps") == 0:
        raise UserError("trainer.max_steps=0 trains nothing: give at least 1, or -1 for trainer.num_train_epochs")
    for name, source in DERIVED_FIELDS.items():
        if cfg.trainer[name] != derived_value(cfg, name):
            raise UserError(f"trainer.{name}={cfg.trainer[name]} follows from {source}: set {source} instead")


def derived_value(cfg: DictConfig, name: str) -> Any:
    """Return the value that a trainer field in DERIVED_FIELDS must have."""
    return f"{cfg.run_dir}/{TRAINING_STATE}" if name == "output_dir" else OmegaConf.select(cfg, DERIVED_FIELDS[name])


def check_resume(cfg: DictConfig) -> None:
    """Raise UserError if there is no run to resume, or no run to which `additional_steps` could be added."""
    unresolved: Any = OmegaConf.to_container(cfg, resolve=False)
    is_dir_given = "${now:" not in str(unresolved["run_dir"])
    if cfg.resume == "auto" and not is_dir_given:
        raise UserError(
            "resume=auto continues the run in run_dir, or starts it there, but run_dir is named by the time: give "
            "run_dir=PATH"
        )
    run = Path(str(cfg.run_dir))
    if cfg.resume == "latest" and is_dir_given and not (run / TRAINING_STATE).is_dir():
        runs = {path.parent.name: f"run_dir={path.parent}" for path in run.parent.glob(f"*/{TRAINING_STATE}")}
        raise UserError(
            f"resume=latest: run_dir={cfg.run_dir} holds no run to continue; resume=auto would start one "
            f"there{did_you_mean(run.name, runs)}"
        )
    if cfg.additional_steps is not None and cfg.resume == "auto":
        raise UserError("resume=auto would add additional_steps again at each start: give trainer.max_steps")
    if cfg.additional_steps is not None and cfg.resume == "none" and cfg.get("branch") is None:
        raise UserError("additional_steps is added to a run's last step: give resume=latest, or trainer.max_steps")


def check_dashboards(cfg: DictConfig) -> None:
    """Raise UserError if the library of a dashboard in `trainer.report_to` is not installed."""
    dashboards = cfg.trainer.get("report_to") or []
    for library in EXTRA_OF:
        if library in dashboards and importlib.util.find_spec(library) is None:
            fix = how_to_install(library)
            raise UserError(f"logger={library}: {library} is not installed: {fix}, or choose another logger")


def check_evaluation_options(options: Mapping[str, Any], prefix: str = "evaluation.") -> None:
    """Raise UserError for options of an evaluation that are out of range or contradict each other.

    Args:
        options: All options, as in `evaluation` of conf/evaluate.yaml.
        prefix: What the user types before the name of an option: see job/evaluation/spelling.py.
    """
    check_kinds(options, load_plain(CONF / "evaluate.yaml")["evaluation"], prefix)
    for key, allowed in ranges("evaluate").items():
        name = key.removeprefix("evaluation.")
        check_allowed(f"{prefix}{name}", options[name], allowed)
    k, responses = options["k"], options["responses_per_prompt"]
    if k is not None and k > responses:
        raise UserError(
            f"{prefix}k={k} is above {prefix}responses_per_prompt={responses}: pass@k needs at least k responses; use "
            f"{prefix}responses_per_prompt={k}"
        )


def choose_probes(names: str) -> str:
    """Return the message that `probe` chooses probes, and `probes.NAME.OPTION` sets their options."""
    return f"probes={names}: choose probes with 'probe={names}'; probes.NAME.OPTION=VALUE sets an option"
