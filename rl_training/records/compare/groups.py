"""Sort runs into groups. Runs of one group were trained alike except for the seed, as their recorded settings show.

Runs with the same seeds are repeats of each other: `seed`, and those of the data and of sampling that have a setting of
their own, such as data.seed. One that is not set follows `seed`.

Ignored, besides seeds: settings that do not affect training (output paths, provenance, probes, dashboards), and the
run's length if the learning rate does not depend on it.
"""

from __future__ import annotations

import string
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.folder import CHECKPOINT, CONFIG_FILE, LOGS_FOLDER
from rl_training.records.frames import find_runs
from rl_training.records.jsonl import METRICS_FILE, has_steps
from rl_training.records.table.config_file import settings_of_run
from rl_training.records.table.series import Run, read_run
from rl_training.records.training_settings import affects_training

SEEDS = ("seed", "data_seed")  # last parts of the names of settings
LENGTHS = ("trainer.max_steps", "trainer.num_train_epochs")
TASK = ("data.", "trainer.reward_weights")  # prefixes of settings that make reward another quantity
# Fields that follow from the number of sequences in a step, or together make it: a label does not repeat them.
BATCH = "batch.sequences_per_step"
PARTS_OF_BATCH = (
    "trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps", "trainer.generation_batch_size",
    "trainer.steps_per_generation", "batch.microbatch_size", "batch.processes",
)  # fmt: skip
ABSENT = "–"
LABEL_LENGTH = 42  # characters; longer labels do not fit above a chart


@dataclass(frozen=True, eq=False)
class Member:
    """A run in a comparison."""

    run: Run
    name: str  # unique in the comparison
    settings: dict[str, Any] | None  # that affect training, dotted name → value; None if none are recorded
    seed: str  # ABSENT if it is not recorded; once in a group, with the further seeds by which its runs differ
    planned_steps: str = ""
    branch: tuple[Path, int] | None = None  # run folder and step that it branched off from
    further_seeds: Mapping[str, str] = field(default_factory=dict)  # those that are set, by dotted name

    @property
    def last_step(self) -> int:
        return self.run.steps[-1]

    @property
    def written(self) -> str:
        """Time of its last logged line."""
        seconds = (self.run.folder / LOGS_FOLDER / METRICS_FILE).stat().st_mtime
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


@dataclass(frozen=True)
class Group:
    """Runs that were trained alike except for their seed."""

    letter: str
    members: list[Member]  # one per seed, and all without a recorded one
    repeats: list[Member]  # further runs with a member's seed, which are no independent samples
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.letter}: {self.label}" if self.label else self.letter


def read_groups(folders: Sequence[str | Path]) -> list[Group]:
    """Return the runs in these folders as groups, in the order given. A folder stands for all runs in it.

    Raises:
        UserError: If there is no run, or its records or settings cannot be read.
    """
    paths = list(dict.fromkeys(run.resolve() for folder in folders for run in find_runs(folder)))
    groups: dict[str, list[Member]] = {}
    for path, name in zip(paths, distinct_names(paths), strict=True):
        member = _read_member(path, name)
        groups.setdefault(_alike(member), []).append(member)
    made = [_make_group(_letter(index), members) for index, members in enumerate(groups.values())]
    return [replace(group, label=label) for group, label in zip(made, _labels(made), strict=True)]


def _alike(member: Member) -> str:
    """Return a text that runs have in common if they were trained alike: what a table of differences would show."""
    if member.settings is None:  # not known to be alike
        return str(member.run.folder)
    return repr(sorted((name, _shown(value)) for name, value in member.settings.items()))


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the settings that differ between groups: name → the value in each group, ABSENT if it has none."""
    settings_by_group = [group.members[0].settings or {} for group in groups]
    names = sorted({name for settings in settings_by_group for name in settings})
    table = {
        name: [_shown(settings[name]) if name in settings else ABSENT for settings in settings_by_group]
        for name in names
    }
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, each extended by parent folders until it is unique.

    >>> distinct_names([Path("/a/one/run"), Path("/a/two/run"), Path("/b/other")])
    ['one/run', 'two/run', 'other']
    """
    names = [path.parts[-1:] for path in paths]
    while len(set(names)) < len(names):
        names = [
            path.parts[-len(name) - 1 :] if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return [str(escape_surrogates("/".join(name))) for name in names]


def _read_member(path: Path, name: str) -> Member:
    run = read_run(path)
    flat = _settings(path)
    if run.config is None and not flat:
        return Member(run, name, None, ABSENT)
    counts = {name: value for name, value in flat.items() if _counts(name, flat)}
    branch = _branch(flat, path)
    counts |= {} if branch is None else {"branch at step": branch[1]}
    seed = str(flat.get("seed", flat.get("trainer.seed", ABSENT)))
    planned_steps = str(flat.get("trainer.max_steps", ""))
    return Member(run, name, counts, seed, planned_steps, branch, _further_seeds(flat))


def _settings(folder: Path) -> dict[str, Any]:
    """Return a run's settings by dotted name. Empty mappings are left out, since they choose nothing."""
    return dict(_flat(settings_of_run(folder)))


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _branch(settings: Mapping[str, Any], folder: Path) -> tuple[Path, int] | None:
    """Return the run folder and step of the checkpoint that the setting `branch` names, or None.

    Args:
        folder: The run with these settings, for the error.
    """
    named = settings.get("branch")
    if named is None:
        return None
    checkpoint = Path(str(named))
    match = CHECKPOINT.fullmatch(checkpoint.name)
    if len(checkpoint.parents) < 2 or match is None:
        raise UserError(f"{folder / CONFIG_FILE}: branch={named} is not a checkpoint folder: fix or remove it")
    return checkpoint.parents[1], int(match[1])


def _counts(name: str, settings: Mapping[str, Any]) -> bool:
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


def trunks_of(groups: Sequence[Group]) -> list[Run]:
    """Return the runs that these branched off from, each up to the branching step, except those that are compared."""
    compared = {member.run.folder for group in groups for member in (*group.members, *group.repeats)}
    trunks: dict[tuple[Path, int], Run] = {}
    for ancestors in (_ancestors(member) for group in groups for member in group.members):
        for folder, step in ancestors.items():
            if folder in compared or not has_steps(folder):
                break
            if (folder, step) not in trunks:
                trunks[folder, step] = read_run(folder).until(step)
    return list(trunks.values())


def common_steps(first: Member, other: Member) -> int:
    """Return how many steps two runs share: up to where they branch off from each other or from a third run."""
    steps, others = ({m.run.folder: m.last_step} | _ancestors(m) for m in (first, other))
    return max((min(step, others[run]) for run, step in steps.items() if run in others), default=0)


def _ancestors(member: Member) -> dict[Path, int]:
    """Return the runs that a run descends from, nearest first, with the step at which it left each."""
    steps = {}
    branch = member.branch
    while branch is not None and branch[0] not in steps:  # no run of ours descends from itself
        folder, step = branch
        steps[folder] = step
        branch = _branch(_settings(folder), folder)
    return steps


def branching_steps(groups: Sequence[Group]) -> list[int]:
    """Return the steps at which runs branched off."""
    return sorted({member.branch[1] for group in groups for member in group.members if member.branch is not None})


def _make_group(letter: str, members: Sequence[Member]) -> Group:
    named = [replace(member, seed=seed) for member, seed in zip(members, _seeds_in_words(members), strict=True)]
    by_seed: dict[str | Member, list[Member]] = {}
    for member in named:  # an unknown seed may be any: such a run is no repeat of another
        by_seed.setdefault(member if member.seed == ABSENT else member.seed, []).append(member)
    chosen = [max(runs, key=lambda member: member.last_step) for runs in by_seed.values()]
    repeats = [member for member in named if member not in chosen]
    return Group(letter, chosen, repeats)


def _seeds_in_words(members: Sequence[Member]) -> list[str]:
    """Return the seed of each run of a group, with the further ones by which they differ: "0 with data.seed=1"."""
    seeds = [member.seed for member in members]
    by_name = {
        name: [member.further_seeds.get(name, member.seed) for member in members]
        for name in sorted({name for member in members for name in member.further_seeds})
    }
    differing = {name: values for name, values in by_name.items() if len(set(values)) > 1 and values != seeds}
    in_words = []
    for place, seed in enumerate(seeds):
        further = " and ".join(f"{name}={values[place]}" for name, values in differing.items())
        in_words.append(f"{seed} with {further}" if further and seed != ABSENT else seed)
    return in_words


def _letter(index: int) -> str:
    """Return the name of a group: A, B, …, Z, A2, B2 and so on."""
    return f"{string.ascii_uppercase[index % 26]}{index // 26 + 1 if index >= 26 else ''}"


def _describe_setting(name: str, value: Any) -> str:
    last = name.rpartition(".")[2]
    return f"no {last}" if value is None else f"{last}={value}"


def _labels(groups: Sequence[Group]) -> list[str]:
    """Return a short label that distinguishes each group: its settings.

    If a label is empty, too long or not unique, every group gets the name of its first run instead.
    """
    differing = _without_repeats(differences(groups))
    labels = list[str]()
    for group in groups:
        settings = group.members[0].settings or {}
        shown = (_describe_setting(setting, settings[setting]) for setting in differing if setting in settings)
        labels.append(", ".join(shown))
    fits = len(set(labels)) == len(labels) and all(0 < len(label) <= LABEL_LENGTH for label in labels)
    return labels if fits else [group.members[0].name for group in groups]


def _without_repeats(differing: Mapping[str, list[str]]) -> list[str]:
    """Return the names of these settings, one of those that have the same values in all groups, as records repeat them.

    >>> _without_repeats({"optimizer.lr": ["0.1", "0.2"], "trainer.learning_rate": ["0.1", "0.2"]})
    ['trainer.learning_rate']
    """
    names = [name for name in differing if BATCH not in differing or name not in PARTS_OF_BATCH]
    by_values = {tuple(differing[name]): name for name in names}  # the last: the trainer's field, not the optimizer's
    return [name for name in names if by_values[tuple(differing[name])] == name]


def other_task(first: Group, second: Group) -> list[str]:
    """Return the settings by which two groups are trained on different tasks, so that their rewards differ in kind."""
    return [name for name in differences([first, second]) if name.startswith(TASK)]
