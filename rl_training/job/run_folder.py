"""Where a run writes: a folder of its own, the same on every process, or the one that it goes on with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging

from rl_training.job.stored_settings import load_settings
from rl_training.records.checkpoints import (
    SHARDED_BY,
    find_checkpoint,
    newest_checkpoint,
    set_aside_later,
    steps_taken,
    written_by,
)
from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER, NOT_OF_TRAINING, TRAINING_STATE
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.masking import without_secrets

logger = logging.get_logger(__name__)

ANOTHERS = "run_dir={} already holds a run: go on with it by resume=latest, choose another, or delete it"


class RunFolder(NamedTuple):
    """A run's folder, and where the run goes on."""

    path: Path
    checkpoint: Path | None  # to resume from; None: from the start
    is_its_own: bool  # it holds this run's config.yaml already


def find_run_folder(cfg: DictConfig) -> RunFolder:
    """Returns the run folder, made and the same on every process, and the checkpoint to resume from."""
    use_cpu = bool(cfg.trainer.get("use_cpu", False)) or not torch.accelerator.is_available()
    state = PartialState(cpu=use_cpu)
    check_number_of_processes(state.num_processes)
    # Each process has its own clock, hence its own default run folder: the main one's counts.
    run_dir = Path(broadcast_object_list([cfg.run_dir])[0])
    sharded_by = next((name for name in SHARDED_BY if parse_flag_from_env(f"ACCELERATE_USE_{name.upper()}")), "")
    if cfg.resume == "auto":
        checkpoint = newest_checkpoint(run_dir, sharded_by)
        if checkpoint is not None or (run_dir / CONFIG_FILE).exists():
            return _go_on(cfg, run_dir, checkpoint, state)
    elif cfg.resume != "none":
        checkpoint = find_checkpoint(str(cfg.resume), run_dir, sharded_by)
        folder = checkpoint.resolve().parent
        run = folder.parent
        if folder.name != TRAINING_STATE:
            raise ValueError(
                f"resume={checkpoint} is in no run folder, where it would be RUN/{TRAINING_STATE}/checkpoint-N: give "
                "one that is, or start a new run from its weights with model=hub model.name=CHECKPOINT"
            )
        overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
        if any(word.startswith("run_dir=") for word in overrides) and run != run_dir.resolve():
            raise ValueError(f"run_dir={run_dir}, but {checkpoint} belongs to the run {run}: leave run_dir out")
        return _go_on(cfg, run, checkpoint, state)
    if (run_dir / LOGS_FOLDER / METRICS_FILE).exists() or (run_dir / CONFIG_FILE).exists():
        raise ValueError(ANOTHERS.format(run_dir))
    state.wait_for_everyone()  # nobody creates it before everybody has looked
    try:
        (run_dir / TRAINING_STATE).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"run_dir={run_dir} cannot be written to ({error}): choose another with run_dir=PATH"
        ) from error
    point = _branching_point(cfg)
    if point is not None:
        taken = steps_taken(point)
        _set_length(cfg, taken)
        if 0 < cfg.trainer.max_steps <= taken:
            raise ValueError(
                f"branch={point} has taken {taken} steps, and trainer.max_steps={cfg.trainer.max_steps}: give a larger "
                "one, or additional_steps=20"
            )
    return RunFolder(run_dir, point, is_its_own=False)


def _branching_point(cfg: DictConfig) -> Path | None:
    """Returns the checkpoint that the run branches off from; None of a run with a start of its own."""
    return Path(cfg.branch) if cfg.get("branch") is not None else None


def _set_length(cfg: DictConfig, taken: int) -> None:
    """Adds `additional_steps` to those that were taken; then they are spent: config.yaml says how far the run goes."""
    if cfg.additional_steps is not None:
        cfg.trainer.max_steps = taken + cfg.additional_steps
        cfg.additional_steps = None


def _go_on(cfg: DictConfig, run: Path, checkpoint: Path | None, state: PartialState) -> RunFolder:
    """Returns the folder of a run that goes on from a checkpoint, or from its start; later ones are set aside."""
    refuse_other_settings(cfg, run)
    if checkpoint is None:
        checkpoint = _branching_point(cfg)
    taken = 0 if checkpoint is None else steps_taken(checkpoint)
    if checkpoint is None:
        logger.warning(f"{run} has no complete checkpoint: it starts again")
    else:
        if written_by(checkpoint) != state.num_processes:
            logger.warning(
                f"{checkpoint.name} was written by {written_by(checkpoint)} process(es) and goes on with "
                f"{state.num_processes}: with other random numbers, so not bitwise as the uninterrupted run would"
            )
        logger.warning(f"going on with {run} from step {taken}")
    state.wait_for_everyone()  # nothing is moved before everybody has looked
    if state.is_main_process:
        set_aside_later(run, taken)
    if checkpoint is not None:
        _set_length(cfg, taken)
    return RunFolder(run, checkpoint, is_its_own=True)


def refuse_other_settings(cfg: DictConfig, run_dir: Path) -> None:
    """Raises ValueError when a run would be resumed with other settings than it has: half of them would not count."""
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


def save_config(config: dict[str, Any], run_dir: Path, is_its_own: bool) -> None:
    """Writes config.yaml, which makes the folder this run's own. ValueError when another run has written it meanwhile.

    On every process: the main one creates the file exclusively, and all of them hear how that went.
    """
    refusal = ""
    if PartialState().is_main_process:
        try:
            with open(run_dir / CONFIG_FILE, "w" if is_its_own else "x", encoding="utf-8") as file:
                file.write(OmegaConf.to_yaml(OmegaConf.create(config)))
        except FileExistsError:
            refusal = ANOTHERS.format(run_dir)
        except OSError as error:
            refusal = f"{run_dir / CONFIG_FILE} cannot be written ({error}): make room, or choose another run_dir"
    refusal = broadcast_object_list([refusal])[0]
    if refusal:
        raise ValueError(refusal)


def check_number_of_processes(num_processes: int) -> None:
    """Raises ValueError when several processes were asked for and this one is alone: it would train on, silently.

    accelerate launch starts a single process without a word where it sees no several GPUs (--cpu, MULTI_CPU, or no
    configuration at all). It does not pass on the number; that it set the address to meet at gives it away.
    """
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked != num_processes:
        raise ValueError(
            f"WORLD_SIZE={asked}, but {num_processes} process(es) met: start them with accelerate launch or torchrun, "
            "or unset WORLD_SIZE"
        )
    met_alone = "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ
    if met_alone and "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise ValueError(
            "accelerate launch was asked for several processes and started only this one: use --config_file "
            "launch/cpu_ddp.yaml for several processes on the CPU, launch/ddp.yaml for several GPUs. If one process is "
            "meant: --num_processes 1, and unset MASTER_PORT"
        )
