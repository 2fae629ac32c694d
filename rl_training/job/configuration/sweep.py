"""Folders of a sweep's jobs (-m): each is named by the values that the command sweeps over."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rl_training.job.configuration.overrides import parse_overrides, root_key
from rl_training.offline.settings import check_name
from rl_training.records.files.masking import mask_arguments

INVALID_IN_FOLDER_NAME = re.compile(r"[^\w.,=+-]+")  # characters that a folder name must not contain
SYNTAX = re.compile(r"[\[\]{}:'\"]")  # of lists and names: without it, values still differ
OF_SETTINGS = re.compile(r"\$\\?\{(?!now:)")  # a reference, not to the time; in a sweep its brace is escaped


def name_job_folder(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Give a training that is a job of a sweep a run folder of its own, in place; leave others as they are.

    References in run_dir stay unresolved: whether the time names it decides what `resume` may do.
    """
    as_given: Any = OmegaConf.to_container(cfg, resolve=False)
    swept = swept_overrides(overrides)
    if swept and isinstance(as_given["run_dir"], str):  # anything else is refused later
        cfg.run_dir = sweep_folder(as_given["run_dir"], overrides, swept)


def swept_overrides(overrides: Sequence[str]) -> list[str]:
    """Return this job's overrides of the settings that the command sweeps over (-m), secrets masked; [] without -m."""
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        return []
    typed = [word for word in sys.argv[1:] if root_key(word)]
    keys = {word.key_or_group for word in parse_overrides(typed) if word.is_sweep_override()}
    return mask_arguments([word.lstrip("+") for word in overrides if word.lstrip("+").partition("=")[0] in keys])


def sweep_folder(run_dir: str, overrides: Sequence[str], swept: Sequence[str]) -> str:
    """Return the run folder of a sweep's job: with the values that the command sweeps over in its name.

    The folder as it is, if it depends on them already: the command sweeps over run_dir, or run_dir=… refers to
    settings. A folder that is typed without that holds the jobs' folders.

    Args:
        run_dir: The folder that the settings name, without the sweep's values. May contain references, such as ${seed}.
        overrides: The job's overrides.
        swept: Those that the command sweeps over; [] outside of a sweep.

    >>> sweep_folder("runs/lr", ["run_dir=runs/lr", "trainer.learning_rate=0.1"], ["trainer.learning_rate=0.1"])
    'runs/lr/learning_rate=0.1'
    >>> sweep_folder("runs/run_12-00_seed_0", ["data=gsm8k"], ["data=gsm8k"])
    'runs/run_12-00_seed_0,data=gsm8k'
    """
    if not swept or _differs_by_job("run_dir", overrides, swept):
        return run_dir
    name = _name_of_values(swept)
    return f"{run_dir.rstrip('/')}/{name}" if _typed("run_dir", overrides) else f"{run_dir},{name}"


def analysis_of_job(overrides: Sequence[str]) -> str:
    """Return what ends the name of an analysis that is a job of a sweep: the values that it analyzes with; or "".

    Checkpoints share a folder of results.
    """
    swept = swept_overrides(overrides)
    if _differs_by_job("name", overrides, swept):
        return ""
    return ",".join(word for word in swept if root_key(word) != "checkpoint")


def evaluation_of_job(overrides: Sequence[str]) -> str:
    """Return what ends the name of an evaluation that is a job of a sweep: the values that it evaluates with; or "".

    Checkpoints share a folder of results, those of another run or output have another one, and the name of a task is
    the default name of its evaluations.
    """
    swept = swept_overrides(overrides)
    if _differs_by_job("evaluation.name", overrides, swept):
        return ""
    in_the_name = ["data"] if not _typed("evaluation.name", overrides) else []
    kept = [word for word in swept if word.partition("=")[0] not in ("run", "checkpoints", "output", *in_the_name)]
    return _name_of_values(kept)


def _typed(key: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of one setting, as they were before `force_add`."""
    return [word.lstrip("+") for word in overrides if word.lstrip("+").partition("=")[0] == key]


def _differs_by_job(key: str, overrides: Sequence[str], swept: Sequence[str]) -> bool:
    """Return whether a setting depends on the sweep's values: it is swept over, or refers to other settings."""
    return any(word in swept or OF_SETTINGS.search(word) for word in _typed(key, overrides))


def _name_of_values(swept: Sequence[str]) -> str:
    """Return the part of a folder's name for these overrides, without the groups of their settings."""
    values = [word.partition("=")[0].rpartition(".")[2] + "=" + word.partition("=")[2] for word in swept]
    return folder_name(",".join(values))


def analysis_folder_name(name: str) -> str:
    """Return the folder for an analysis of this name, or raise UserError if it is not a valid folder name.

    Text after a comma names a sweep's job by its settings, which may hold what no folder name can: see `folder_name`.
    """
    typed, comma, swept = name.partition(",")
    check_name(typed)
    return f"{typed}{comma}{folder_name(swept)}"


def folder_name(values: str) -> str:
    """Return the part of a folder's name for values, with a digest if more than quotes and brackets had to be removed.

    >>> folder_name("layers=[1,2]"), folder_name("path=/a/b")
    ('layers=1,2', 'path=ab,3927b1')
    """
    name = INVALID_IN_FOLDER_NAME.sub("", values)
    is_whole = INVALID_IN_FOLDER_NAME.search(SYNTAX.sub("", values)) is None
    return name if is_whole else f"{name},{hashlib.sha256(values.encode()).hexdigest()[:6]}"
