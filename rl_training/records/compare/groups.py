"""Sort runs into groups. Runs of one group were trained alike except for the seed, as their recorded settings show.

Ignored, besides seeds: settings that do not affect training (output paths, provenance, probes, dashboards), and the
run's length if the learning rate does not depend on it.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_training.records.compare.members import ABSENT, Member, read_member
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.frames import find_runs

TASK = ("data.", "trainer.reward_weights")  # prefixes of settings that make reward another quantity
# Fields that follow from the number of sequences in a step, or together make it: a label does not repeat them.
BATCH = "batch.sequences_per_step"
PARTS_OF_BATCH = (
    "trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps", "trainer.generation_batch_size",
    "trainer.steps_per_generation", "batch.microbatch_size", "batch.processes",
)  # fmt: skip
LABEL_LENGTH = 42  # characters; longer labels do not fit above a chart


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
    groups: dict[str, list[Member]] = {}  # by what runs have in common that were trained alike
    for path, name in zip(paths, distinct_names(paths), strict=True):
        member = read_member(path, name)
        groups.setdefault(_training_key(member), []).append(member)
    unlabelled = [_make_group(_letter(index), members) for index, members in enumerate(groups.values())]
    return [replace(group, label=label) for group, label in zip(unlabelled, _labels(unlabelled), strict=True)]


def _training_key(member: Member) -> str:
    """Return a text that runs have in common if they were trained alike: what a table of differences would show."""
    if member.settings is None:  # it may have been trained in any way
        return str(member.run.folder)
    return repr(sorted((name, _setting_text(value)) for name, value in member.settings.items()))


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the settings that differ between groups: name → the value in each group, ABSENT if it has none."""
    settings_by_group = [group.members[0].settings or {} for group in groups]
    names = sorted({name for settings in settings_by_group for name in settings})
    table = {
        name: [_setting_text(settings[name]) if name in settings else ABSENT for settings in settings_by_group]
        for name in names
    }
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def _setting_text(value: Any) -> str:
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


def _make_group(letter: str, members: Sequence[Member]) -> Group:
    with_seeds = [replace(member, seed=seed) for member, seed in zip(members, _seeds_in_words(members), strict=True)]
    by_seed: dict[str | Member, list[Member]] = {}
    for member in with_seeds:  # an unknown seed may be any: such a run is no repeat of another
        by_seed.setdefault(member if member.seed == ABSENT else member.seed, []).append(member)
    longest = [max(runs, key=lambda member: member.last_step) for runs in by_seed.values()]
    repeats = [member for member in with_seeds if member not in longest]
    return Group(letter, longest, repeats)


def _seeds_in_words(members: Sequence[Member]) -> list[str]:
    """Return the seed of each run of a group, with the further ones by which they differ: "0 with data.seed=1"."""
    seeds = [member.seed for member in members]
    by_name = {
        name: [member.further_seeds.get(name, member.seed) for member in members]
        for name in sorted({name for member in members for name in member.further_seeds})
    }
    distinguishing = {name: values for name, values in by_name.items() if len(set(values)) > 1 and values != seeds}
    in_words = []
    for place, seed in enumerate(seeds):
        further = " and ".join(f"{name}={values[place]}" for name, values in distinguishing.items())
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
    names = _without_repeats(differences(groups))
    labels = list[str]()
    for group in groups:
        settings = group.members[0].settings or {}
        parts = (_describe_setting(setting, settings[setting]) for setting in names if setting in settings)
        labels.append(", ".join(parts))
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
