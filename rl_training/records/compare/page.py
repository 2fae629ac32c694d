"""The comparison's page: what it says, its tables and its charts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl_training.errors import UserError
from rl_training.records.compare.final import (
    Column,
    Difference,
    columns_at,
    compare_groups,
    final_figures,
    last_common_step,
)
from rl_training.records.compare.groups import Group, differences, read_groups
from rl_training.records.compare.lineage import branching_steps
from rl_training.records.compare.members import ABSENT, Member
from rl_training.records.compare.overlays import draw_overlays
from rl_training.records.compare.sentences import describe, one_group
from rl_training.records.folder import COMPARISON_FILE
from rl_training.records.pages.charts import Chart
from rl_training.records.pages.page import pictures as draw_pictures
from rl_training.records.pages.page import write_page
from rl_training.records.table.estimates import to_estimates
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference, is_significant

Table = dict[str, list[Estimate | None]]  # by label, the estimate in each column; None in a column without one


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint of a run with the largest mean reward in an evaluation."""

    run: str
    evaluation: str
    step: int
    reward: Estimate
    near: list[int]  # steps whose reward is not significantly lower


@dataclass(frozen=True)
class ComparisonPage:
    """The values of templates/comparison.html."""

    title: str
    sentences: list[str]
    charts: list[Chart]
    groups: list[Group]
    ends: list[int]  # of each group: the last step that two of its runs have reached
    without_settings: str  # letters of the groups whose settings are not known
    seeds_are_recorded: bool
    differences: dict[str, list[str]]  # settings
    columns: list[Column]
    final: Table
    pairs: list[Difference]
    pair_figures: Table
    num_intervals: int  # of differences
    has_single_seeds: bool
    has_branches: bool
    best: list[BestCheckpoint]

    @classmethod
    def of(cls, groups: list[Group], num_runs: int) -> ComparisonPage:
        ends = [last_common_step(group) for group in groups]
        common = min(ends)  # where all can be compared; groups that went on are shown at their own end too
        columns = columns_at(groups, common)
        columns += [
            Column(group, end, heading=f"{group.letter}, later")
            for group, end in zip(groups, ends, strict=True)
            if end > common
        ]
        pairs = compare_groups(groups)
        members = [member for group in groups for member in group.members]
        return cls(
            title=f"{num_runs} runs in {len(groups)} group{'s' if len(groups) > 1 else ''}",
            sentences=describe(pairs) or [one_group([member.seed for member in groups[0].members])],
            charts=draw_overlays(groups, pairs), groups=groups, ends=ends,
            without_settings=", ".join(group.letter for group in groups if group.members[0].settings is None),
            seeds_are_recorded=all(member.seed != ABSENT for member in members),
            differences=differences(groups), columns=columns, final=_by_label(list(map(final_figures, columns))),
            pairs=pairs, pair_figures=_by_label([pair.figures for pair in pairs]),
            num_intervals=sum(len(pair.figures) for pair in pairs),
            has_single_seeds=any(pair.single_seed for pair in pairs), has_branches=bool(branching_steps(groups)),
            best=[best for member in members for best in _best_checkpoints(member)],
        )  # fmt: skip


def write_comparison(folders: Sequence[str | Path], out: str | Path, pictures: str = "") -> tuple[Path, list[str]]:
    """Write the page that compares all runs in these folders; return its path and its findings.

    The runs may be finished, killed or still going. Whatever comes from their records is escaped.

    Args:
        folders: Run folders, or folders of runs.
        out: Path of the page, or a folder for comparison.html, as a path without an ending is.
        pictures: "png" or "svg" also writes each chart as such a file next to the page, with the page's name as prefix.

    Raises:
        UserError: If there are fewer than two runs, or one cannot be read or compared.
    """
    groups = read_groups(folders)
    num_runs = sum(len(group.members) + len(group.repeats) for group in groups)
    if num_runs < 2:
        raise UserError(f"{groups[0].members[0].run.folder} is one run: a comparison needs at least two")
    is_folder = Path(out).is_dir() or str(out).endswith(("/", os.sep)) or not Path(out).suffix
    path = Path(out) / COMPARISON_FILE if is_folder else Path(out)
    page = ComparisonPage.of(groups, num_runs)
    page = replace(page, charts=[replace(chart, name=f"{path.stem}_{chart.name}") for chart in page.charts])
    write_page(path, "comparison.html", draw_pictures(page.charts, pictures), page=page)
    return path, page.sentences


def _by_label(columns: Sequence[dict[str, Estimate]]) -> Table:
    """Return the rows of a table with these columns."""
    labels = dict.fromkeys(label for column in columns for label in column)
    return {label: [column.get(label) for column in columns] for label in labels}


def _best_checkpoints(member: Member) -> Iterator[BestCheckpoint]:
    """Yield the best checkpoint of each evaluation that has errors."""
    for evaluation in sorted(member.run.evaluations, key=lambda source: source.title):
        by_step = to_estimates(member.run.finite_rows("reward", evaluation).dropna(subset=["stderr"]))
        if by_step:
            best = max(by_step, key=lambda step: by_step[step].value)
            near = [s for s, e in by_step.items() if s != best and not is_significant(difference(by_step[best], e))]
            yield BestCheckpoint(member.name, evaluation.title, best, by_step[best], near)
