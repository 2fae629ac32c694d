"""Checks of the composed configuration, before anything is written: each mistake an error that names the way out."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from rl_training.hosts.trl.trainer import DrGRPOConfig
from rl_training.job.explain import quoted
from rl_training.job.stored_settings import GONE, load_settings
from rl_training.records.folder import CONFIG_FILE, NOT_OF_TRAINING, TRAINING_STATE
from rl_training.records.masking import without_secrets

PATHS = ("run_dir", "resume", "data.path", "model.name")
WHOLE_NUMBERS = {
    "batch.sequences_per_step": (1, 2**20),
    "batch.microbatch_size": (1, 2**20),
    "trainer.num_generations": (2, 2**20),  # one response has nothing to be compared with
    "seed": (0, 2**32 - 1),  # numpy's bound
}
# Settings of the trainer below which it would train nothing, or something else; -1 steps: as many as the epochs have.
LEAST = {"num_iterations": 1, "max_completion_length": 1, "learning_rate": 0, "max_grad_norm": 0, "weight_decay": 0,
         "adam_epsilon": 0, "warmup_steps": 0}  # fmt: skip
COUNTS = ("every", "responses_per_prompt", "sequences", "count", "seed", "split_prompts")
SHARES = ("decay", "error_decay")
MOST_SEQUENCES = 2**16  # of a buffer that a probe validates on: hours on any machine
SAME_AS = {
    "per_device_train_batch_size": "batch.microbatch_size",
    "seed": "seed",
    "output_dir": "run_dir",
}


def expand_home(cfg: DictConfig) -> None:
    """Puts the user's home folder for a `~` at the beginning of a path, which a shell leaves alone after a `=`."""
    for key in PATHS:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, str) and value.startswith("~"):
            OmegaConf.update(cfg, key, str(Path(value).expanduser()))


def read_numbers(cfg: DictConfig) -> None:
    """Puts numbers for the texts that environment variables give: seed=${oc.env:SLURM_ARRAY_TASK_ID}."""
    for key in WHOLE_NUMBERS:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, str) and value.isdecimal():
            OmegaConf.update(cfg, key, int(value))


def check_settings(cfg: DictConfig) -> None:
    """Raises ValueError for settings that are no number, do not exist, or say twice what has one place."""
    if not isinstance(cfg.run_dir, str) or not cfg.run_dir.strip():
        raise ValueError(f"run_dir={cfg.run_dir} is no folder: give run_dir=PATH, or leave it out for one of its own")
    for key, (least, most) in WHOLE_NUMBERS.items():
        value = OmegaConf.select(cfg, key)
        if type(value) is not int or not least <= value <= most:
            bound = f", at most {most}" if type(value) is int and value > most else ""
            raise ValueError(f"{key}={value} must be a whole number, at least {least}{bound}")
    _check_probes(cfg.get("probes"))
    for key in ("data.path", "model.name"):
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, str | None):
            raise ValueError(f"{key}={value} is no path: in quotes it is one, {quoted(key, str(value))}")
    shown = OmegaConf.select(cfg, "logger.metrics", default="all")
    if shown not in ("core", "all"):
        raise ValueError(f"logger.metrics={shown}: choose core, about 15 numbers, or all")
    every = OmegaConf.select(cfg, "rollouts.every", default=0)  # a config.yaml may be older than a setting
    if type(every) is not int or every < 0:
        raise ValueError(f"rollouts.every={every} must be a whole number, or 0 for none")
    _check_alert(cfg)
    if cfg.model.get("quantization") and not cfg.adapter:
        raise ValueError("4-bit weights cannot be trained: use adapter=qlora, or model.quantization=null")
    _check_trainer(cfg)


def _check_trainer(cfg: DictConfig) -> None:
    """Raises ValueError for what in cfg.trainer TRL does not know, comes too late, or has its place elsewhere."""
    fields = {field.name: field for field in dataclasses.fields(DrGRPOConfig) if field.init}
    for name in cfg.trainer:
        if name != "_target_" and name not in fields:
            close = difflib.get_close_matches(name, fields, n=3)
            hint = f"did you mean {' or '.join(f'trainer.{c}' for c in close)}?" if close else "see trl.GRPOConfig"
            raise ValueError(f"trainer.{name} is not a field of DrGRPOConfig: {hint}")
    if cfg.trainer.get("deepspeed"):
        raise ValueError(  # the processes have met before this is read, and would train by DDP
            "trainer.deepspeed comes too late: use accelerate launch --config_file launch/zero2.yaml, which names the "
            "DeepSpeed configuration"
        )
    if "gradient_accumulation_steps" in cfg.trainer:
        raise ValueError(
            "trainer.gradient_accumulation_steps follows from the batch: set batch.sequences_per_step instead"
        )
    exact = cfg.model.get("dtype", "float32") == "float32" and not cfg.model.get("quantization")
    if cfg.trainer.get("use_vllm") and cfg.adapter and not exact:
        raise ValueError(
            "for vLLM, TRL merges the adapter into the frozen weights and takes it out again at every step, and "
            "rounding wears off weights of less than fp32: use adapter=lora model.dtype=float32, or "
            "trainer.use_vllm=false"
        )
    for name, value in cfg.trainer.items():
        _check_number(str(name), fields[name].type if name in fields else None, value)
    for name, source in SAME_AS.items():
        expected = f"{cfg.run_dir}/{TRAINING_STATE}" if name == "output_dir" else OmegaConf.select(cfg, source)
        if cfg.trainer[name] != expected:
            raise ValueError(f"trainer.{name}={cfg.trainer[name]} follows from {source}: set {source} instead")


def check_resume(cfg: DictConfig) -> None:
    """Raises ValueError where resume=auto would never find its run again: its folder is named by the time."""
    as_written = OmegaConf.to_container(cfg, resolve=False)
    if cfg.resume == "auto" and isinstance(as_written, dict) and "${now:" in str(as_written["run_dir"]):
        raise ValueError(
            "resume=auto goes on with the run in run_dir, or starts it there, and run_dir is named by the time: give "
            "run_dir=PATH"
        )


def check_additional_steps(cfg: DictConfig) -> None:
    """Raises ValueError where `additional_steps` is no number, or nothing goes on that it could be added to."""
    more = cfg.additional_steps
    if more is None:
        return
    if type(more) is not int or more < 1:
        raise ValueError(f"additional_steps={more} must be a whole number, at least 1")
    if cfg.resume == "auto":
        raise ValueError("additional_steps would be added again at each start by resume=auto: give trainer.max_steps")
    if cfg.resume == "none":
        raise ValueError("additional_steps is added to what a run has taken: give resume=latest, or trainer.max_steps")


def _check_alert(cfg: DictConfig) -> None:
    if "alert" not in cfg:  # the config.yaml of a run from before there was one
        return
    below, stop = cfg.alert.below, cfg.alert.stop
    if below is not None and (type(below) not in (int, float) or not 0 < below < math.inf):
        raise ValueError(f"alert.below={below} must be a number above 0, nats per token, or null for no alert")
    if type(stop) is not bool:
        raise ValueError(f"alert.stop={stop} must be true or false")
    if stop and below is None:
        raise ValueError("alert.stop is of an alert that is off: give alert.below=0.05")


def _check_number(name: str, kind: Any, value: Any) -> None:
    numbers: tuple[type, ...] = {"int": (int,), "float": (int, float)}.get(getattr(kind, "__name__", kind), ())
    if getattr(kind, "__name__", kind) == "bool" and type(value) is not bool:
        raise ValueError(f"trainer.{name}={value} must be true or false")
    hint = "; 0 switches clipping off" if name == "max_grad_norm" else ""
    if numbers and type(value) not in numbers:
        raise ValueError(f"trainer.{name}={value} must be a {'whole ' * (float not in numbers)}number{hint}")
    if numbers and not math.isfinite(value):
        raise ValueError(f"trainer.{name}={value} must be finite{hint}")
    if name in LEAST and numbers and value < LEAST[name]:
        raise ValueError(f"trainer.{name}={value} must be at least {LEAST[name]}{hint}")
    if name == "max_steps" and value != -1 and value < 1:
        raise ValueError(
            f"trainer.max_steps={value} trains nothing: give at least 1, or -1 for trainer.num_train_epochs"
        )


def _check_probes(probes: Any) -> None:
    if not isinstance(probes, DictConfig):
        raise ValueError("there is nothing in `probes`: for a run without probes give probe=none")
    for probe in map(str, probes):
        if not isinstance(probes[probe], DictConfig):
            raise ValueError(f"probes.{probe}={probes[probe]}: for a run without it leave it out of the list probe=[…]")
        for option, value in probes[probe].items():
            _check_probe_option(f"probes.{probe}.{option}", value)


def _check_probe_option(key: str, value: Any) -> None:
    if key in GONE:
        raise ValueError(f"{key}: this setting is gone: {GONE[key]}")
    name = key.rsplit(".", 1)[-1]
    if name in SHARES and type(value) not in (int, float):
        raise ValueError(f"{key}={value} must be a number")
    if name == "num_folds" and value is not None and type(value) is not int:
        raise ValueError(f"{key}={value} must be a whole number, or null for one per microbatch")
    if name in COUNTS and (type(value) is not int or value < 0):
        raise ValueError(f"{key}={value} must be a whole number, at least {int(name == 'every')}")
    if name == "sequences" and value > MOST_SEQUENCES:
        raise ValueError(f"{key}={value} would take hours at each validation: at most {MOST_SEQUENCES}")


def refuse_other_settings(cfg: DictConfig, run_dir: Path) -> None:
    """Raises ValueError when a run would be resumed with other settings than it has: half of them would not count."""
    stored = run_dir / CONFIG_FILE
    if not stored.is_file():
        return
    before, now = (_flat(without_secrets(OmegaConf.to_container(c, resolve=True))) for c in (_load(stored), cfg))
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


def _load(config: Path) -> DictConfig:
    try:
        loaded = load_settings(config)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{config} cannot be read ({error}): mend or delete it; without it the settings are not compared"
        ) from error
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"{config} holds no settings: mend or delete it; without it the settings are not compared")
    return loaded


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of a nested configuration by their dotted keys."""
    if not isinstance(node, Mapping):
        return {prefix.removesuffix("."): node}
    return {key: value for name in node for key, value in _flat(node[name], f"{prefix}{name}.").items()}
