"""Checks of train.py's configuration, before anything is written: each mistake an error that names the fix.

Nothing here imports torch: a mistyped value is said at once. What only TRL knows of its fields is in trainer_fields.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_training.job.explain import CONF, did_you_mean, load_plain, quoted
from rl_training.job.kinds import Range, refuse_other_kinds, refuse_unset
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
# Settings of the trainer beyond which it would train nothing, or something else, without a word.
RANGES = {
    "num_train_epochs": Range(float, 0), "num_iterations": Range(int, 1), "max_completion_length": Range(int, 1),
    "learning_rate": Range(float, 0), "max_grad_norm": Range(float, 0), "weight_decay": Range(float, 0),
    "adam_beta1": Range(float, 0, 1), "adam_beta2": Range(float, 0, 1), "adam_epsilon": Range(float, 0),
    "warmup_steps": Range(float, 0), "temperature": Range(float, 0, open=True), "top_p": Range(float, 0, 1, open=True),
    "top_k": Range(int, 0, or_none=True), "min_p": Range(float, 0, 1, or_none=True),
    "repetition_penalty": Range(float, 0, open=True), "epsilon": Range(float, 0),
    "epsilon_high": Range(float, 0, or_none=True), "max_steps": Range(int, -1),
}  # fmt: skip
COUNTS = ("every", "responses_per_prompt", "sequences", "count", "seed", "split_prompts")
MOST_SEQUENCES = 2**16  # of a buffer that a probe validates on: hours on any machine
SAME_AS = {
    "per_device_train_batch_size": "batch.microbatch_size",
    "seed": "seed",
    "output_dir": "run_dir",
}


def expand_home(cfg: DictConfig) -> None:
    """Puts the user's home folder for a `~` at the beginning of a path, which a shell does not expand after a `=`."""
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


def check_run(cfg: DictConfig) -> int:
    """Returns how many microbatches of each process make a step, after all checks of what can be known by now."""
    refuse_unset(cfg)
    check_resume(cfg)
    expand_home(cfg)
    read_numbers(cfg)
    check_settings(cfg)
    check_additional_steps(cfg)
    return accumulation_steps(
        cfg.batch.sequences_per_step,
        cfg.batch.microbatch_size,
        num_processes=int(os.environ.get("WORLD_SIZE", "1")),
        responses_per_prompt=cfg.trainer.num_generations,
    )


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
    """Raises ValueError for what in cfg.trainer comes too late, is out of range, or has its place elsewhere."""
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
        if name in RANGES:
            hint = "; 0 switches clipping off" if name == "max_grad_norm" else ""
            RANGES[str(name)].check(f"trainer.{name}", value, hint)
    if cfg.trainer.get("max_steps") == 0:
        raise ValueError("trainer.max_steps=0 trains nothing: give at least 1, or -1 for trainer.num_train_epochs")
    for name, source in SAME_AS.items():
        expected = f"{cfg.run_dir}/{TRAINING_STATE}" if name == "output_dir" else OmegaConf.select(cfg, source)
        if cfg.trainer[name] != expected:
            raise ValueError(f"trainer.{name}={cfg.trainer[name]} follows from {source}: set {source} instead")


def check_resume(cfg: DictConfig) -> None:
    """Raises ValueError where resume would never find its run again, or another one than the folder that is named."""
    as_written: Any = OmegaConf.to_container(cfg, resolve=False)
    is_given = "${now:" not in str(as_written["run_dir"])
    if cfg.resume == "auto" and not is_given:
        raise ValueError(
            "resume=auto goes on with the run in run_dir, or starts it there, and run_dir is named by the time: give "
            "run_dir=PATH"
        )
    run = Path(str(cfg.run_dir)).expanduser()
    if cfg.resume == "latest" and is_given and not (run / TRAINING_STATE).is_dir():
        runs = {path.parent.name: f"run_dir={path.parent}" for path in run.parent.glob(f"*/{TRAINING_STATE}")}
        raise ValueError(
            f"resume=latest: run_dir={cfg.run_dir} holds no run to go on with, resume=auto would start it there"
            f"{did_you_mean(run.name, runs)}"
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
    if "within_steps" in cfg.alert:
        raise ValueError(f"alert.within_steps: this setting is gone: {GONE['alert.within_steps']}")
    below, stop = cfg.alert.below, cfg.alert.stop
    if below is not None and (type(below) not in (int, float) or not 0 < below < math.inf):
        raise ValueError(f"alert.below={below} must be a number above 0, nats per token, or null for no alert")
    if type(stop) is not bool:
        raise ValueError(f"alert.stop={stop} must be true or false")
    if stop and below is None:
        raise ValueError("alert.stop is of an alert that is off: give alert.below=0.05")


def _check_probes(probes: Any) -> None:
    if not isinstance(probes, DictConfig):
        raise ValueError("there is nothing in `probes`: for a run without probes give probe=none")
    for probe in map(str, probes):
        if not isinstance(probes[probe], DictConfig):
            raise ValueError(f"probes.{probe}={probes[probe]}: for a run without it leave it out of the list probe=[…]")
        file = CONF / "probe" / f"{probe}.yaml"
        if file.is_file():
            refuse_other_kinds(probes[probe], load_plain(file)[probe], f"probes.{probe}.")
        for option, value in probes[probe].items():
            _check_probe_option(f"probes.{probe}.{option}", value)


def _check_probe_option(key: str, value: Any) -> None:
    if key in GONE:
        raise ValueError(f"{key}: this setting is gone: {GONE[key]}")
    name = key.rsplit(".", 1)[-1]
    if name == "num_folds" and value is not None and type(value) is not int:
        raise ValueError(f"{key}={value} must be a whole number, or null for one per microbatch")
    if name in COUNTS and (type(value) is not int or value < 0):
        raise ValueError(f"{key}={value} must be a whole number, at least {int(name == 'every')}")
    if name == "sequences" and value > MOST_SEQUENCES:
        raise ValueError(f"{key}={value} would take hours at each validation: at most {MOST_SEQUENCES}")


def accumulation_steps(
    sequences_per_step: int, microbatch_size: int, num_processes: int, responses_per_prompt: int
) -> int:
    """Returns how many microbatches of each process make a step. ValueError, naming numbers that would divide."""
    if microbatch_size % responses_per_prompt:
        fitting = max(microbatch_size // responses_per_prompt, 1) * responses_per_prompt
        raise ValueError(
            f"batch.microbatch_size={microbatch_size} must hold whole prompts of "
            f"trainer.num_generations={responses_per_prompt} responses: use batch.microbatch_size={fitting}"
        )
    at_once = microbatch_size * num_processes
    if sequences_per_step % at_once or sequences_per_step < 1:
        fitting = max(round(sequences_per_step / at_once), 1) * at_once
        raise ValueError(
            f"batch.sequences_per_step={sequences_per_step} is not a multiple of batch.microbatch_size="
            f"{microbatch_size} x {num_processes} process(es) = {at_once}: use batch.sequences_per_step={fitting}"
        )
    return sequences_per_step // at_once


def refuse_other_settings(cfg: DictConfig, run_dir: Path) -> None:
    """Raises ValueError when a run would be resumed with other settings than it has: half of them would not count."""
    stored = run_dir / CONFIG_FILE
    if not stored.is_file():
        return
    try:
        started = load_settings(stored)
    except ValueError as error:
        raise ValueError(f"{error}; without it the settings are not compared") from error
    before, now = (_flat(without_secrets(OmegaConf.to_container(c, resolve=True))) for c in (started, cfg))
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


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of a nested configuration by their dotted keys."""
    if not isinstance(node, Mapping):
        return {prefix.removesuffix("."): node}
    return {key: value for name in node for key, value in _flat(node[name], f"{prefix}{name}.").items()}
