"""The folder that a run writes to, the same on every process: a new one, or that of the run it continues."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.hosts.trl.config import DrGRPOConfig
from rl_training.hosts.trl.output.run_folder import RunFolder, on_main_process
from rl_training.job.configuration.overrides import root_key
from rl_training.job.configuration.run_settings import refuse_other_settings
from rl_training.job.configuration.stored import escape_interpolations
from rl_training.job.objects.trainer_checks import check_number_of_processes
from rl_training.job.run.waiting import watch_for_waiting
from rl_training.records.checkpoint_flaws import SHARDED_BY, written_by
from rl_training.records.checkpoints import find_checkpoint, newest_checkpoint, set_aside_later, steps_taken
from rl_training.records.config import write_config
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.stored_yaml import holds_settings
from rl_training.records.folder import (
    CONFIG_FILE,
    LOGS_FOLDER,
    REPORT_FOLDER,
    TENSORBOARD_FOLDER,
    TRAINING_STATE,
    WANDB_FOLDER,
    has_settings,
    refuse_a_file,
)
from rl_training.records.hydra_text import quote_override
from rl_training.records.jsonl import has_records

logger = logging.get_logger(__name__)

DAMAGED = f"{CONFIG_FILE}.damaged"  # the name that a config.yaml without settings gets
CHOOSE_ANOTHER = "choose another with run_dir=PATH"
RUN_EXISTS = "run_dir={} already holds a run: continue it with resume=latest, choose another, or delete it"
# Subfolders that a run and its dashboards create.
RUN_SUBFOLDERS = (LOGS_FOLDER, WANDB_FOLDER, TENSORBOARD_FOLDER, REPORT_FOLDER, TRAINING_STATE)


@dataclass(frozen=True)
class RunStart:
    """Where a training writes, and what it continues."""

    run_folder: RunFolder  # locked
    checkpoint: Path | None  # to continue from: of this run, or of the one that it branches from
    step: int  # number of optimizer steps behind the checkpoint; 0 without one
    is_resumed: bool  # whether the folder already belongs to this run

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.run_folder.folder


def open_run_folder(cfg: DictConfig) -> RunStart:
    """Lock the run folder, find the checkpoint to continue from, and make the folder ready to write to. Collective.

    All processes get the same. In this order:

    1. The processes join, and agree on the folder.
    2. The main process locks it if a run there may be continued: another process could be writing the checkpoints that
       are read next.
    3. The checkpoint is found. It decides the folder, if `resume` names a checkpoint rather than `latest` or `auto`.
    4. A folder that leads out of itself or holds another run is refused; any other is locked now, unless it is already.
    5. A run to resume is refused if it was started with other settings.
    6. Once all processes have passed these checks, files in the way are moved, and the folder is created.

    Raises:
        UserError: If the folder holds another run, is locked or cannot be written to, or there is nothing to resume.
    """
    state = _join_processes(cfg)
    # The default run folder is named after the time, which differs between processes: use the main process's.
    run_dir = Path(on_main_process(lambda: str(cfg.run_dir)))
    run_folder = RunFolder(run_dir)
    may_resume_here = cfg.resume == "auto" or (cfg.resume == "latest" and (run_dir / TRAINING_STATE).is_dir())
    if may_resume_here:
        on_main_process(lambda: run_folder.lock(CHOOSE_ANOTHER))

    # On one process: it reads all bytes of a checkpoint.
    run_folder.folder, checkpoint = on_main_process(lambda: _find_resumed(str(cfg.resume), run_dir))
    start, is_damaged = _read_start(cfg, run_folder, checkpoint)

    if not may_resume_here:
        on_main_process(lambda: run_folder.lock(CHOOSE_ANOTHER))
    for name in RUN_SUBFOLDERS:
        refuse_a_file(start.path / name)
    if start.is_resumed:
        refuse_other_settings(cfg, start.path)
        _say_where_it_continues(start, state.num_processes)
    state.wait_for_everyone()

    if state.is_main_process:
        _move_out_of_the_way(start, is_damaged)
    try:
        (start.path / TRAINING_STATE).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir={start.path} cannot be written to ({error}): {CHOOSE_ANOTHER}") from error
    return start


def _read_start(cfg: DictConfig, run_folder: RunFolder, resumed: Path | None) -> tuple[RunStart, bool]:
    """Return where a training starts, and whether config.yaml in its folder is damaged, so that the run starts anew.

    Args:
        cfg: Settings of the training.
        run_folder: The folder to write to.
        resumed: Checkpoint to resume from, if any.

    Raises:
        UserError: If the folder leads out of itself, or holds a run that is not resumed.
    """
    run = run_folder.folder
    refuse_links_out(run)
    is_damaged = cfg.resume == "auto" and resumed is None and _has_only_damaged_settings(run)
    has_config = has_settings(run) and not is_damaged
    is_resumed = cfg.resume != "none" and (resumed is not None or has_config) and not is_damaged
    if not is_resumed and (has_config or has_records(run)):
        raise UserError(RUN_EXISTS.format(run))
    branched_from = None if cfg.get("branch") is None else Path(cfg.branch)
    checkpoint = resumed or branched_from
    return RunStart(run_folder, checkpoint, steps_taken(checkpoint) if checkpoint else 0, is_resumed), is_damaged


def _move_out_of_the_way(start: RunStart, is_damaged: bool) -> None:
    """Set aside the checkpoints of steps that a resumed run takes again, and a config.yaml without settings."""
    run = start.path
    if start.is_resumed:
        set_aside_later(run, start.step)
    if is_damaged:
        (run / CONFIG_FILE).replace(run / DAMAGED)
        logger.warning(f"{run / CONFIG_FILE} was not written completely (it is now {DAMAGED}): the run starts anew")


def _has_only_damaged_settings(run: Path) -> bool:
    """Return whether a folder without records holds a config.yaml without settings, as a crash can leave it."""
    return has_settings(run) and not has_records(run) and not holds_settings(run / CONFIG_FILE)


def _join_processes(cfg: DictConfig) -> PartialState:
    """Open the process group of this training, and return accelerate's state of it."""
    use_cpu = bool(cfg.trainer.get("use_cpu", False)) or not torch.accelerator.is_available()
    # The timeout must be given here: the trainer would set it too late.
    timeout = timedelta(seconds=cfg.trainer.get("ddp_timeout", DrGRPOConfig.ddp_timeout))
    state = PartialState(cpu=use_cpu, timeout=timeout)
    check_number_of_processes(state.num_processes)
    watch_for_waiting()
    return state


def _say_where_it_continues(start: RunStart, num_processes: int) -> None:
    run = start.path
    checkpoint = start.checkpoint
    if checkpoint is None:
        logger.warning(f"{run} has no complete checkpoint: it starts from the beginning")
        return
    written = written_by(checkpoint)
    if written != num_processes:
        logger.warning(
            f"{checkpoint.name}: the number of processes changes from {written} to {num_processes}: "
            "random numbers differ, so it is not bitwise the uninterrupted run"
        )
    logger.warning(f"continuing {run} from step {start.step}")


def _find_resumed(resume: str, run_dir: Path) -> tuple[Path, Path | None]:
    """Return the run folder and the checkpoint that `resume` names; the checkpoint is None if it names none."""
    sharded_by = next((name for name in SHARDED_BY if parse_flag_from_env(f"ACCELERATE_USE_{name.upper()}")), "")
    if resume in ("none", "auto"):
        return run_dir, newest_checkpoint(run_dir, sharded_by) if resume == "auto" else None
    is_there = resume == "latest" and (run_dir / TRAINING_STATE).is_dir()  # so a new run without resume is refused
    again = f"start it from its first step with {quote_override('run_dir', str(run_dir))} resume=auto"
    or_else = again if is_there else "start a new run without resume"
    checkpoint = find_checkpoint(resume, run_dir, sharded_by, or_else=or_else)
    folder = checkpoint.resolve().parent
    run = folder.parent  # its config.yaml may be missing: the settings are those of this command
    if folder.name != TRAINING_STATE:
        raise UserError(
            f"resume={checkpoint} is not in a run folder (RUN/{TRAINING_STATE}/checkpoint-N): give one that is, or "
            "start a new run from its weights with model=hub model.name=CHECKPOINT"
        )
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    if any(root_key(word) == "run_dir" for word in overrides) and run != run_dir.resolve():
        raise UserError(f"run_dir={run_dir}, but {checkpoint} belongs to the run {run}: leave run_dir out")
    return run, checkpoint


def save_config(config: dict[str, Any], run_dir: Path, is_resumed: bool) -> None:
    """Write config.yaml, which makes the folder this run's own. Collective.

    Args:
        config: All settings of the run.
        run_dir: Run folder.
        is_resumed: Whether the run is resumed, so that a config.yaml that exists there is its own.

    Raises:
        UserError: On every process, if another run has written config.yaml in the meantime.
    """

    def save() -> None:
        if has_settings(run_dir) and not is_resumed:  # cannot change after this: the folder is locked
            raise UserError(RUN_EXISTS.format(run_dir))
        write_config(run_dir, escape_interpolations(config), fix="make room, or choose another run_dir")

    on_main_process(save)
