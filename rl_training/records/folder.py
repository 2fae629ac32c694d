"""Names of the files and folders in a run folder. Files in `logs` are named in the modules that read and write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rl_training.errors import UserError

CONFIG_FILE = "config.yaml"  # every setting, and the run's provenance
LOGS_FOLDER = "logs"  # metrics.jsonl, probes.jsonl and the local files of dashboards
WANDB_FOLDER = f"{LOGS_FOLDER}/wandb"
TENSORBOARD_FOLDER = f"{LOGS_FOLDER}/tensorboard"
REPORT_FOLDER = "report"
PAGE_FILE = "report.html"  # the page of one run, in REPORT_FOLDER
OFFLINE = "offline"  # analyses of checkpoints
EVALUATIONS = "evaluations"
COMPARISON_FILE = "comparison.html"  # the page of several runs, in the current folder
TRAINING_STATE = "training_state"  # the checkpoint-N folders
WRITTEN = (CONFIG_FILE, LOGS_FOLDER, REPORT_FOLDER, OFFLINE, EVALUATIONS, TRAINING_STATE)  # what commands write
# Files of a checkpoint:
TRAINER_STATE_FILE = "trainer_state.json"  # which step it is of, and the trainer's log; written last
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
WEIGHTS_ALONE = "model"  # a folder of weights alone, as some other trainers write it; its parent holds the optimizer
CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")  # the trainer's name for a checkpoint's folder


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoint-N folders of a run, complete or not, sorted by step."""
    return checkpoints_in(run / TRAINING_STATE)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoint-N folders in a folder, complete or not, sorted by step."""
    return sorted((path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return N of a folder checkpoint-N. Raises UserError for any other name, such as checkpoint-20-backup."""
    match = CHECKPOINT.fullmatch(checkpoint.name)
    if match is None:
        raise UserError(f"{checkpoint} is not called checkpoint-N: rename it, or give another folder")
    return int(match[1])


def number_at_end(folder: Path) -> int:
    """Return the number that a folder's name ends with, as other trainers name their checkpoints; 0 without one.

    >>> number_at_end(Path("global_step_40")), number_at_end(Path("final"))
    (40, 0)
    """
    digits = re.search(r"[0-9]+$", folder.name)
    return int(digits.group()) if digits else 0


def state_folder(checkpoint: Path) -> Path:
    """Return the folder that holds optimizer and scheduler: the checkpoint, or the folder around weights in `model`."""
    alone = checkpoint.resolve().name == WEIGHTS_ALONE and not (checkpoint / TRAINER_STATE_FILE).is_file()
    return checkpoint.resolve().parent if alone else checkpoint


def checkpoint_name(checkpoint: Path) -> str:
    """Return the name of a checkpoint's folder; of weights in `model`, that of the folder around it.

    >>> checkpoint_name(Path("runs/state/checkpoint-20")), checkpoint_name(Path("trained/global_step_20/model"))
    ('checkpoint-20', 'global_step_20')
    """
    return state_folder(checkpoint).absolute().name


def has_settings(run: Path) -> bool:
    """Return whether a folder holds a config.yaml, the settings of a job or of an attached run."""
    return (run / CONFIG_FILE).is_file()


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint belongs to, or None: a folder with settings around its training_state.

    Both are asked for: other programs keep a config.yaml two levels above their checkpoints too.
    """
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == TRAINING_STATE and has_settings(folder.parent) else None


def cache_folder() -> Path:
    """Return the folder, outside of runs, for what can be made or fetched again; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_training"


def refuse_a_file(path: Path) -> None:
    """Raise UserError if a file stands at the path of a folder that is to be created."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, but a folder of this name is needed: move the file away")
