"""Checks of the composed configuration, before anything is written: each mistake an error that names the way out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_training.live.trainer import DrGRPOConfig

CONFIG_FILE = "config.yaml"
# What a resumed run may have otherwise than before: where it writes, how far it goes, what it measures.
FREE_ON_RESUME = ("run_dir", "resume", "probes.", "trainer.output_dir", "trainer.max_steps", "trainer.save_",
                  "trainer.logging_", "trainer.report_to", "trainer.disable_tqdm", "trainer.run_name",
                  "trainer.project", "trainer.eval_", "trainer.dataloader_")  # fmt: skip
SAME_AS = {
    "per_device_train_batch_size": "batch.microbatch_size",
    "seed": "seed",
    "output_dir": "run_dir",
}


def check_settings(cfg: DictConfig) -> None:
    """Raises ValueError for settings that are no number, do not exist, or say twice what has one place."""
    for key in ("batch.sequences_per_step", "batch.microbatch_size", "trainer.num_generations", "seed"):
        value = OmegaConf.select(cfg, key)
        smallest = 0 if key == "seed" else 1
        if type(value) is not int or value < smallest:
            raise ValueError(f"{key}={value} must be a whole number, at least {smallest}")
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
    if cfg.model.get("quantization") and not cfg.adapter:
        raise ValueError("4-bit weights cannot be trained: use adapter=qlora, or model.quantization=null")
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
        expected = f"{cfg.run_dir}/training_state" if name == "output_dir" else OmegaConf.select(cfg, source)
        if cfg.trainer[name] != expected:
            raise ValueError(f"trainer.{name}={cfg.trainer[name]} follows from {source}: set {source} instead")


def _check_number(name: str, kind: Any, value: Any) -> None:
    numbers: tuple[type, ...] = {"int": (int,), "float": (int, float)}.get(getattr(kind, "__name__", kind), ())
    if numbers and type(value) not in numbers:
        hint = "; 0 switches clipping off" if name == "max_grad_norm" else ""
        raise ValueError(f"trainer.{name}={value} must be a number{hint}")


def refuse_other_settings(cfg: DictConfig, run_dir: Path) -> None:
    """Raises ValueError when a run would be resumed with other settings than it has: half of them would not count."""
    stored = run_dir / CONFIG_FILE
    if not stored.is_file():
        return
    before, now = (_flat(OmegaConf.to_container(c, resolve=True)) for c in (OmegaConf.load(stored), cfg))
    changed = [
        f"{key}={now.get(key)!r} (was {before.get(key)!r})"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(FREE_ON_RESUME)
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
