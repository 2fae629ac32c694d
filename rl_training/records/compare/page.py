"""The comparison's page: its findings in sentences, and what its template shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import difference, is_significant
from rl_training.records.atomic_write import write_atomically
from rl_training.records.compare import final
from rl_training.records.compare.groups import Group, Member, branching_steps, differences, read_groups
from rl_training.records.compare.overlays import draw_law, draw_overlays
from rl_training.records.folder import COMPARISON_FILE
from rl_training.records.report.page import render
from rl_training.records.report.series import to_estimates
from rl_training.records.report.words import sentences


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> tuple[Path, list[str]]:
    """Returns the path of the page it wrote, and its findings. The page is `out`, or comparison.html in that folder.

    Runs may be finished, running or killed; a folder stands for all runs in it.
    Raises FileNotFoundError where there is no run, and ValueError for what cannot be read or compared.
    """
    groups = read_groups(folders)
    if sum(len(group.members) + len(group.repeats) for group in groups) < 2:
        raise ValueError(f"{groups[0].members[0].run.folder} is one run: a comparison needs at least two")
    page = Path(out) / COMPARISON_FILE if Path(out).is_dir() else Path(out)
    html, findings = render_comparison(groups)
    write_atomically({page: html.encode()})
    return page, findings


def render_comparison(groups: Sequence[Group]) -> tuple[str, list[str]]:
    """Returns the page's HTML and its findings, with which it opens. Everything that comes from the runs is escaped."""
    ends = [final.last_common_step(group) for group in groups]
    common = min(ends)  # where all can be compared; those that went on are shown at their own end too
    columns = [(group, common, group.letter, final.begun(groups, common)) for group in groups]
    columns += [(g, end, f"{g.letter}, later", 0) for g, end in zip(groups, ends, strict=True) if end > common]
    pairs = final.compare_groups(groups)
    findings = sentences("comparison", pairs=pairs, seeds=[member.seed for member in groups[0].members])
    laws = [final.fit_law(group) for group in groups]
    num_runs = sum(len(group.members) + len(group.repeats) for group in groups)  # two at least
    page = render(
        "comparison.html",
        title=f"{num_runs} runs in {len(groups)} group{'s' * (len(groups) > 1)}",
        sentences=findings,
        ends=ends,
        groups=groups,
        differences=differences(groups),
        columns=[(heading, f"{step}; {len(final.members_at(group, step))}") for group, step, heading, _ in columns],
        final=_by_label([final.final_figures(group, step, since) for group, step, _, since in columns]),
        pairs=pairs,
        pair_figures=_by_label([pair.figures for pair in pairs]),
        branched=bool(branching_steps(groups)),
        best=[row for group in groups for member in group.members for row in _best_rows(member)],
        charts=[*draw_overlays(groups), draw_law(groups, laws)],
        laws=laws,
    )
    return page, findings


def _by_label(columns: Sequence[dict[str, Estimate]]) -> dict[str, list[Estimate | None]]:
    """Returns the rows of a table of these columns: None where one lacks the label."""
    labels = dict.fromkeys(label for column in columns for label in column)
    return {label: [column.get(label) for column in columns] for label in labels}


def _best_rows(member: Member) -> Iterator[dict[str, Any]]:
    """Yields the checkpoint with the largest mean reward, for each evaluation that has errors."""
    for evaluation in sorted(member.run.evaluations):
        by_step = to_estimates(member.run.known("reward", evaluation).dropna(subset=["stderr"]))
        if by_step:
            best = max(by_step, key=lambda step: by_step[step].value)
            near = [s for s, e in by_step.items() if s != best and not is_significant(difference(by_step[best], e))]
            reward = by_step[best]
            yield {"run": member.run.name, "evaluation": evaluation, "step": best, "reward": reward, "near": near}
