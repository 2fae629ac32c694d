"""Prepares the settings of a command once: typed paths and numbers are normalized, then everything is checked.

What needs the prepared settings takes them as PreparedRun, PreparedAnalysis or PreparedEvaluation, so that settings
which nobody has checked do not pass. Nothing here imports torch, so a mistyped value fails before the slow imports.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_training.errors import UserError
from rl_training.job.configuration.checks import (
    check_dashboards,
    check_evaluation_options,
    check_paths,
    check_resume,
    check_settings,
    check_values,
    ranges,
)
from rl_training.job.configuration.nested import flatten, load_plain
from rl_training.job.configuration.overrides import PATH_KEYS, with_home
from rl_training.job.configuration.shipped import CONF
from rl_training.job.configuration.sweep import analysis_folder_name
from rl_training.offline.settings import Settings


@dataclass(frozen=True)
class PreparedRun:
    """Settings of a training."""

    cfg: DictConfig
    num_microbatches: int  # per step on each process


@dataclass(frozen=True)
class PreparedAnalysis:
    """Settings of an analysis of checkpoints."""

    settings: Settings  # how to analyze
    values: dict[str, Any]  # all settings of the command, resolved
    folder_name: str  # of the analysis


@dataclass(frozen=True)
class PreparedEvaluation:
    """Settings of an evaluation of checkpoints."""

    values: dict[str, Any]  # all settings of the command, resolved
    job: str = ""  # at the end of the evaluation's name, after a comma: which job of a sweep it is


def prepare_run(cfg: DictConfig) -> PreparedRun:
    """Return the settings of a training, as far as they can be checked without torch. `cfg` is not changed.

    Those of a branch are partly its run's, so that `~` in them was not typed: `resolve_branch` has expanded it where it
    was.

    Raises:
        UserError: For values that are missing, out of range, or contradict each other.
    """
    cfg = cfg.copy()
    if cfg.get("branch") is None:
        normalize(cfg, "train")
    else:
        read_numbers(cfg, "train")
    check_resume(cfg)
    check_settings(cfg)
    check_dashboards(cfg)
    num_microbatches = microbatches_per_step(
        cfg.batch.sequences_per_step,
        cfg.batch.microbatch_size,
        num_processes=int(os.environ.get("WORLD_SIZE", "1")),
        responses_per_prompt=cfg.trainer.num_generations,
    )
    return PreparedRun(cfg, num_microbatches)


def prepare_analysis(cfg: DictConfig) -> PreparedAnalysis:
    """Return the settings of an analysis of checkpoints. `cfg` is not changed.

    Raises:
        UserError: For values that are missing or invalid.
    """
    check_paths(cfg, ("checkpoint", "output", "runs_dir", "log.directory"), lists=("checkpoint",))
    values = _checked_values(cfg, "offline")
    folder_name = analysis_folder_name(str(values["name"]))
    makers: dict[str, Any] = {part.name: part.default_factory for part in fields(Settings)}  # MISSING for a plain value
    settings = Settings(
        **{key: values[key] if make is MISSING else make(**values[key]) for key, make in makers.items()}
    )
    return PreparedAnalysis(settings, values, folder_name)


def prepare_evaluation(cfg: DictConfig, job: str = "") -> PreparedEvaluation:
    """Return the settings of an evaluation of checkpoints, of this job of a sweep if any. `cfg` is not changed.

    Raises:
        UserError: For values that are missing or invalid.
    """
    check_paths(cfg, ("run", "checkpoints", "output", "data.path", "model.name"), lists=("checkpoints",))
    values = _checked_values(cfg, "evaluate")
    check_evaluation_options(values["evaluation"])
    for name, metric in values["metrics"].items():
        if not isinstance(metric, dict):
            raise UserError(f"metrics.{name}={metric} is no metric: give metrics.{name}._target_=FILE.FUNCTION")
    return PreparedEvaluation(values, job)


def _checked_values(cfg: DictConfig, command: str) -> dict[str, Any]:
    """Return a command's settings as plain values, normalized. UserError for one that is missing or out of range."""
    cfg = cfg.copy()
    normalize(cfg, command)
    check_values(cfg, command)
    return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


def normalize(cfg: DictConfig, command: str) -> None:
    """Expand `~` in paths, and make numbers of digits that came as text; in place, in settings that were typed."""
    for key in PATH_KEYS:
        value = OmegaConf.select(cfg, key)
        expanded = with_home(key, value)
        if expanded != value:
            OmegaConf.update(cfg, key, expanded)
    read_numbers(cfg, command)


def read_numbers(cfg: DictConfig, command: str) -> None:
    """Make numbers of digits that came as text, in place: seed=${oc.env:SLURM_ARRAY_TASK_ID}.

    Those are the command's settings in ranges.yaml, and those whose default in conf/ is a whole number.
    """
    defaults = flatten(load_plain(CONF / f"{command}.yaml"))
    numbers = (key for key, default in defaults.items() if type(default) is int)
    for key in {**ranges(command), **dict.fromkeys(numbers)}:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, str) and value.isdecimal():
            OmegaConf.update(cfg, key, int(value))


def microbatches_per_step(
    sequences_per_step: int, microbatch_size: int, num_processes: int, responses_per_prompt: int
) -> int:
    """Return the number of microbatches per step on each process.

    Raises:
        UserError: If the sizes do not divide; the message names sizes that do.
    """
    if microbatch_size % responses_per_prompt:
        suggested = max(microbatch_size // responses_per_prompt, 1) * responses_per_prompt
        raise UserError(
            f"batch.microbatch_size={microbatch_size} must hold whole prompts of "
            f"trainer.num_generations={responses_per_prompt} responses: use batch.microbatch_size={suggested}"
        )
    sequences_at_once = microbatch_size * num_processes
    if sequences_per_step % sequences_at_once or sequences_per_step < 1:
        suggested = max(round(sequences_per_step / sequences_at_once), 1) * sequences_at_once
        raise UserError(
            f"batch.sequences_per_step={sequences_per_step} is not a multiple of batch.microbatch_size="
            f"{microbatch_size} x {num_processes} (processes) = {sequences_at_once}: use "
            f"batch.sequences_per_step={suggested}"
        )
    return sequences_per_step // sequences_at_once
