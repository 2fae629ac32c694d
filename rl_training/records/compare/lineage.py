"""Which runs branched off from which, and how many steps they share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_training.records.compare.groups import Group
from rl_training.records.compare.members import Member, branch_in, flat_settings
from rl_training.records.jsonl import has_steps
from rl_training.records.table.reading import read_run
from rl_training.records.table.series import Run


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
    steps = {first.run.folder: first.last_step} | _ancestors(first)
    other_steps = {other.run.folder: other.last_step} | _ancestors(other)
    return max((min(step, other_steps[run]) for run, step in steps.items() if run in other_steps), default=0)


def _ancestors(member: Member) -> dict[Path, int]:
    """Return the runs that a run descends from, nearest first, with the step at which it left each."""
    steps = dict[Path, int]()
    branch = member.branch
    while branch is not None and branch.folder not in steps:  # no run of ours descends from itself
        steps[branch.folder] = branch.step
        branch = branch_in(flat_settings(branch.folder), branch.folder)
    return steps


def branching_steps(groups: Sequence[Group]) -> list[int]:
    """Return the steps at which runs branched off."""
    return sorted({member.branch.step for group in groups for member in group.members if member.branch is not None})
