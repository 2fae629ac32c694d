"""The comparison's page: the contents of its tables and sentences."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from rl_training.mathematics.welch import difference, is_significant
from rl_training.records.compare.final import (
    Difference,
    begun,
    compare_groups,
    final_figures,
    last_common_step,
    members_at,
)
from rl_training.records.compare.groups import ABSENT, Group, Member, branching_steps, differences
from rl_training.records.compare.law import FittedLaw, fit_law
from rl_training.records.compare.overlays import draw_law, draw_overlays
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.frames import estimate_of
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report.page import render
from rl_training.records.report.summary import in_words

IN_WORDS = ("reward", "token entropy")  # differences that the page opens with
NO_COMMON_STEP = "no step is recorded in both, and there is nothing to compare"
ANOTHER_SEED = " This is a single seed: another may change it by more than the noise within a run."


def render_comparison(groups: Sequence[Group], findings: Sequence[str]) -> str:
    """Returns the page's HTML, which opens with the findings. Everything that comes from the runs is escaped."""
    ends = [last_common_step(group) for group in groups]
    common = min(ends)  # where all can be compared; those that went on are shown at their own end too
    columns = [(group, common, group.letter, begun(groups, common)) for group in groups]
    columns += [(g, end, f"{g.letter}, later", 0) for g, end in zip(groups, ends, strict=True) if end > common]
    figures = [final_figures(group, step, since) for group, step, _, since in columns]
    pairs = compare_groups(groups)
    laws = [fit_law(group) for group in groups]
    labels = dict.fromkeys(label for of_group in figures for label in of_group)
    num_runs = sum(len(group.members) + len(group.repeats) for group in groups)  # two at least
    return render(
        "comparison.html",
        title=f"{num_runs} runs in {len(groups)} group{'s' * (len(groups) > 1)}",
        sentences=findings,
        runs=[row for group in groups for row in _run_rows(group)],
        groups=groups,
        unknown=[group.letter for group in groups if group.members[0].settings is None],
        differences=differences(groups),
        columns=[(heading, f"{step}; {len(members_at(group, step))}") for group, step, heading, _ in columns],
        final={label: [in_words(of_group.get(label)) for of_group in figures] for label in labels},
        pairs=pairs,
        pair_cells=_pair_cells(pairs),
        num_differences=sum(len(pair.figures) for pair in pairs),
        branched=bool(branching_steps(groups)),
        any_single=any(pair.single_seed for pair in pairs),
        best=[row for group in groups for member in group.members for row in _best_rows(member)],
        pictures=[*draw_overlays(groups), draw_law(groups, laws)],
        laws=[_law_row(law) for law in laws],
        too_high=[_too_high(law) for law in laws if law.leads_too_high],
    )


def sentences(groups: Sequence[Group]) -> list[str]:
    """Returns the findings, a sentence for each pair of groups: what differs at their last common step, by how much."""
    pairs = compare_groups(groups)
    if not pairs:
        seeds = ", ".join(member.seed for member in groups[0].members)
        return [f"One group: of what affects training, only the seeds differ ({seeds})."]
    found = []
    for pair in pairs:
        told = [_told(pair, label) for label in IN_WORDS if label in pair.figures]
        if not told:
            found.append(f"{pair.second.name} against {pair.first.name}: {NO_COMMON_STEP}.")
            continue
        caveat = ANOTHER_SEED if pair.single_seed else ""
        found.append(f"{pair.second.name} against {pair.first.name}, at step {pair.step}: {'; '.join(told)}.{caveat}")
    return found


def _told(pair: Difference, label: str) -> str:
    estimate = pair.figures[label]
    if math.isnan(estimate.ends()[0]):
        return f"{label} {in_words(estimate, signed=True)}, without an error bar: more steps or seeds would give one"
    if not is_significant(estimate):
        return f"{label} does not differ by more than noise ({in_words(estimate, signed=True)})"
    return (
        f"{label} {'higher' if estimate.value > 0 else 'lower'} by more than noise ({in_words(estimate, signed=True)})"
    )


def _run_rows(group: Group) -> list[dict[str, str]]:
    end, rows = last_common_step(group), []
    for member in (*group.members, *group.repeats):
        if any(member is repeat for repeat in group.repeats):
            note = "left out: a run of this seed is in the group already"
        elif member.last_step < end:
            note = "left out of the final figures: it ended before the others"
        else:
            note = ""
        written = (member.run.folder / LOGS_FOLDER / METRICS_FILE).stat().st_mtime
        rows.append({
            "group": group.letter, "name": member.run.name, "seed": member.seed, "note": note,
            "steps": f"{member.last_step} of {member.planned_steps}" if member.planned_steps else str(member.last_step),
            "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(written)),
        })  # fmt: skip
    return rows


def _pair_cells(pairs: Sequence[Difference]) -> dict[str, list[tuple[str, bool]]]:
    labels = dict.fromkeys(label for pair in pairs for label in pair.figures)
    return {
        label: [
            (in_words(pair.figures[label], signed=True), is_significant(pair.figures[label]))
            if label in pair.figures
            else (ABSENT, False)
            for pair in pairs
        ]
        for label in labels
    }


def _best_rows(member: Member) -> list[dict[str, Any]]:
    """Returns the checkpoint with the largest mean reward, for each evaluation that has errors."""
    rows = []
    rewards = member.evaluations[member.evaluations["metric"] == "reward"].dropna(subset=["value", "stderr"])
    for evaluation, table in rewards.groupby("evaluation"):
        by_step = {int(row.step): estimate_of(row) for row in table.itertuples()}
        best = max(by_step, key=lambda step: by_step[step].value)
        near = [s for s, e in by_step.items() if s != best and not is_significant(difference(by_step[best], e))]
        rows.append({
            "run": member.run.name, "evaluation": evaluation, "step": best, "reward": in_words(by_step[best]),
            "others": ", ".join(str(step) for step in near),
        })  # fmt: skip
    return rows


def _law_row(fitted: FittedLaw) -> dict[str, str]:
    miss = (
        in_words(fitted.miss, signed=True) if math.isfinite(fitted.miss.value) else f"{ABSENT} ({fitted.miss.reason})"
    )
    if math.isfinite(fitted.miss.value):
        miss += ": it did not hold" if is_significant(fitted.miss) else ": it held"
    row = {"group": fitted.group.letter, "points": f"{len(fitted.points)}: {fitted.source}", "miss": miss}
    if fitted.law is None:
        return {**row, "a": ABSENT, "b": ABSENT, "ceiling": f"{ABSENT} ({fitted.reason})"}
    law = fitted.law
    return {**row, "a": in_words(law.a), "b": in_words(law.b), "ceiling": in_words(law.ceiling)}


def _too_high(fitted: FittedLaw) -> str:
    assert fitted.law
    why = "the curve does not hold down to H = 0" if fitted.law.ceiling.ends()[0] > fitted.most else "within its error"
    return (
        f"{fitted.group.letter}: the ceiling is above {fitted.most:g}, the most a response earns, {why}: no forecast."
    )
