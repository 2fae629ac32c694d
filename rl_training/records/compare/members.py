"""A run in a comparison: its records, its settings that affect training, its seeds, and where it branched off.

Runs with the same seeds are repeats of each other: `seed`, and those of the data and of sampling that have a setting of
their own, such as data.seed. One that is not set follows `seed`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rl_training.errors import UserError
from rl_training.records.folder import CHECKPOINT, CONFIG_FILE, LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.table.config_file import settings_of_run
from rl_training.records.table.reading import read_run
from rl_training.records.table.series import Run
from rl_training.records.training_settings import affects_training

SEEDS = ("seed", "data_seed")  # last parts of the names of settings
LENGTHS = ("trainer.max_steps", "trainer.num_train_epochs")
ABSENT = "–"


class Branch(NamedTuple):
    """Where a run branched off.

    Args:
        folder: Of the run that it branched off from.
        step: Of the checkpoint that it started from.
    """

    folder: Path
    step: int


@dataclass(frozen=True, eq=False)
class Member:
    """A run in a comparison."""

    run: Run
    name: str  # unique in the comparison
    settings: dict[str, Any] | None  # that affect training, dotted name → value; None if none are recorded
    seed: str  # ABSENT if it is not recorded; once in a group, with the further seeds by which its runs differ
    planned_steps: str = ""
    branch: Branch | None = None
    further_seeds: Mapping[str, str] = field(default_factory=dict)  # those that are set, by dotted name

    @property
    def last_step(self) -> int:
        return self.run.steps[-1]

    @property
    def written(self) -> str:
        """Time of its last logged line."""
        seconds = (self.run.folder / LOGS_FOLDER / METRICS_FILE).stat().st_mtime
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def read_member(folder: Path, name: str) -> Member:
    """Return the run in a folder, under a name that is unique in the comparison."""
    run = read_run(folder)
    settings = flat_settings(folder)
    if run.config is None and not settings:
        return Member(run, name, None, ABSENT)
    of_training = {name: value for name, value in settings.items() if _distinguishes(name, settings)}
    branch = branch_in(settings, folder)
    if branch is not None:
        of_training["branch at step"] = branch.step
    return Member(
        run,
        name,
        settings=of_training,
        seed=str(settings.get("seed", settings.get("trainer.seed", ABSENT))),
        planned_steps=str(settings.get("trainer.max_steps", "")),
        branch=branch,
        further_seeds=_further_seeds(settings),
    )


def flat_settings(folder: Path) -> dict[str, Any]:
    """Return a run's settings by dotted name. Empty mappings are left out, since they choose nothing."""
    return dict(_flat(settings_of_run(folder)))


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def branch_in(settings: Mapping[str, Any], folder: Path) -> Branch | None:
    """Return the branch whose checkpoint the setting `branch` names, or None.

    Args:
        folder: The run with these settings, for the error.
    """
    setting = settings.get("branch")
    if setting is None:
        return None
    checkpoint = Path(str(setting))
    match = CHECKPOINT.fullmatch(checkpoint.name)
    if len(checkpoint.parents) < 2 or match is None:
        raise UserError(f"{folder / CONFIG_FILE}: branch={setting} is not a checkpoint folder: fix or remove it")
    return Branch(checkpoint.parents[1], int(match[1]))


def _distinguishes(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether runs that differ in this setting were not trained alike."""
    if name in LENGTHS:
        return settings.get("trainer.lr_scheduler_type") != "constant"
    return not _is_seed(name) and name != "branch" and affects_training(name)


def _is_seed(name: str) -> bool:
    return name.rpartition(".")[2] in SEEDS


def _further_seeds(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the seeds that are set beside `seed`, by dotted name, without those of probes, which train nothing."""
    return {
        name: str(value)
        for name, value in settings.items()
        if _is_seed(name) and name != "seed" and value is not None and affects_training(name)
    }
