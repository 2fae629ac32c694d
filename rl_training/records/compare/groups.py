"""Runs → groups: runs that were trained alike but for the seed are one group.

Not compared, besides seeds: settings that do not affect training (output paths, provenance, probes, alert, dashboards),
and the run's length, where the learning rate does not depend on it.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER, NOT_OF_TRAINING
from rl_training.records.frames import evaluations, find_runs
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report.series import Run, read_run

SEEDS = ("seed", "data_seed")  # last segments of a setting's name
LENGTHS = ("trainer.max_steps", "trainer.num_train_epochs")
ABSENT = "–"
LABEL_LENGTH = 42  # of a group: longer ones do not fit above a picture


@dataclass(frozen=True)
class Member:
    """A run in a comparison."""

    run: Run
    settings: dict[str, str] | None  # dotted name → value, without what does not count; None without a config.yaml
    seed: str
    evaluations: pd.DataFrame
    planned_steps: str = ""
    most_reward: float = math.nan  # that a response can earn, where the run has said so
    branch: Path | None = None  # the checkpoint of another run that it has branched off from

    @property
    def last_step(self) -> int:
        return int(self.run.metrics[-1]["step"])


@dataclass(frozen=True)
class Group:
    """Runs that were trained alike but for their seed.

    members  one per seed
    repeats  further runs of a member's seed: the same run again, not a second sample
    """

    letter: str
    members: list[Member]
    repeats: list[Member]
    label: str = ""
    trunks: Sequence[
        Member
    ] = ()  # what its runs have branched off from, up to there, where that is not compared itself

    @property
    def name(self) -> str:
        return f"{self.letter}: {self.label}" if self.label else self.letter


def read_groups(folders: Sequence[str | Path]) -> list[Group]:
    """Returns the runs of these folders in groups, in the order in which they were named; a folder stands for its runs.

    Raises FileNotFoundError where there is no run, and ValueError for records or a configuration that cannot be read.
    """
    paths = list(dict.fromkeys(run.resolve() for folder in folders for run in find_runs(folder)))
    groups: dict[Any, list[Member]] = {}
    for path in paths:
        member = _read_member(path)
        key = path if member.settings is None else tuple(sorted(member.settings.items()))
        groups.setdefault(key, []).append(member)
    made = [_make_group(_letter(index), members, paths) for index, members in enumerate(groups.values())]
    return [replace(group, label=label) for group, label in zip(made, _labels(made), strict=True)]


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Returns the settings that are not the same in all groups: name → the value in each, ABSENT where it has none."""
    known = [group.members[0].settings or {} for group in groups]
    names = sorted({name for settings in known for name in settings})
    table = {name: [settings.get(name, ABSENT) for settings in known] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def _read_member(path: Path) -> Member:
    run = read_run(path)
    if run.config is None:
        return Member(run, None, ABSENT, evaluations(path))
    flat = _settings(path / CONFIG_FILE, run.config)
    counts = {name: value for name, value in flat.items() if _counts(name, flat)}
    branch = _branch(flat)
    counts |= {} if branch is None else {"branch at step": str(_step(branch))}
    seed, steps = flat.get("seed", flat.get("trainer.seed", ABSENT)), flat.get("trainer.max_steps", "")
    return Member(run, counts, seed, evaluations(path), steps, float(flat.get("provenance.most_reward", "nan")), branch)


def _settings(path: Path, text: str) -> dict[str, str]:
    """Returns the settings of a config.yaml by their dotted names."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read ({where}): repair or remove it") from error
    return dict(_flatten(config if isinstance(config, dict) else {}))


def _branch(settings: Mapping[str, str]) -> Path | None:
    return None if settings.get("branch", "None") == "None" else Path(settings["branch"])


def _flatten(node: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted name, value as text) of every leaf. An empty mapping has none: it chooses nothing."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flatten(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(node)


def _counts(name: str, settings: Mapping[str, str]) -> bool:
    """Returns whether this setting affects training."""
    if name in LENGTHS:
        return settings.get("trainer.lr_scheduler_type") != "constant"
    return name.rpartition(".")[2] not in SEEDS and name != "branch" and not name.startswith(NOT_OF_TRAINING)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _trunks(members: Sequence[Member], compared: Sequence[Path]) -> list[Member]:
    """Returns the runs that these have branched off from, each up to the step where it was; not those compared too."""
    found: dict[Path, Member] = {}
    for member in members:
        while member.branch is not None and member.branch not in found:
            of, step = member.branch.parents[1], _step(member.branch)
            if of in compared or not (of / LOGS_FOLDER / METRICS_FILE).is_file():
                break
            checkpoint, member = member.branch, _read_member(of)
            metrics = [row for row in member.run.metrics if int(row["step"]) <= step]
            estimates = {k: {s: e for s, e in v.items() if s <= step} for k, v in member.run.estimates.items()}
            evaluated = member.evaluations[member.evaluations["step"] <= step]
            found[checkpoint] = replace(
                member, run=replace(member.run, metrics=metrics, estimates=estimates), evaluations=evaluated
            )
    return list(found.values())


def common_steps(one: Member, other: Member) -> int:
    """Returns how many steps two runs have in common: up to where they branch off from each other, or from a third."""
    steps, of_other = _way_of(one), _way_of(other)
    return max((min(step, of_other[run]) for run, step in steps.items() if run in of_other), default=0)


def _way_of(member: Member) -> dict[Path, int]:
    """Returns the runs that it goes on from, each with the step where it has left it; itself with its last."""
    steps, branch = {member.run.folder: member.last_step}, member.branch
    while branch is not None:
        of, config = branch.parents[1], branch.parents[1] / CONFIG_FILE
        steps[of] = _step(branch)
        text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
        branch = _branch(_settings(config, text))
    return steps


def branching_steps(groups: Sequence[Group]) -> list[int]:
    """Returns the steps at which runs have branched off."""
    return sorted({_step(member.branch) for group in groups for member in group.members if member.branch is not None})


def _make_group(letter: str, members: list[Member], compared: Sequence[Path]) -> Group:
    furthest: dict[str, Member] = {}
    for member in members:
        known = furthest.get(member.seed)
        if known is None or member.last_step > known.last_step:
            furthest[member.seed] = member
    chosen = list(furthest.values())
    repeats = [member for member in members if not any(member is m for m in chosen)]
    return Group(letter, chosen, repeats, trunks=_trunks(chosen, compared))


def _letter(index: int) -> str:
    """Returns A, B, …, Z, AA, AB, …"""
    letters = string.ascii_uppercase
    return letters[index] if index < 26 else _letter(index // 26 - 1) + letters[index % 26]


def _said(name: str, value: str) -> str:
    return f"no {name}" if value == "None" else f"{name}={value}"


def _labels(groups: Sequence[Group]) -> list[str]:
    """Returns a short label that distinguishes each group: its settings, or the names of their first runs."""
    differing = differences(groups)
    labels = []
    for settings in (group.members[0].settings or {} for group in groups):
        labels.append(
            ", ".join(_said(name.rpartition(".")[2], settings[name]) for name in differing if name in settings)
        )
    fits = len(set(labels)) == len(labels) and all(0 < len(label) <= LABEL_LENGTH for label in labels)
    return labels if fits else [group.members[0].run.name for group in groups]
