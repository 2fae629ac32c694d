"""The charts of a comparison: for each quantity, the curves of all groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from rl_training.records.compare import final
from rl_training.records.compare.groups import Group
from rl_training.records.compare.lineage import branching_steps, trunks_of
from rl_training.records.compare.path_chart import draw_paths
from rl_training.records.evaluated import BUILT_IN_METRICS, largest_pass_at, metric_info
from rl_training.records.pages.charts import GREY, TEXT, Chart, Series
from rl_training.records.pages.drawing import axis_limits, draw
from rl_training.records.table.cumulative import sum_starts
from rl_training.records.table.estimates import finite, to_estimates, to_rows
from rl_training.records.table.series import LOGGED, MEASURED, TRAINERS_EVALUATION, Run, Source
from rl_training.records.table.trends import running_window
from rl_training.statistics.estimate import Estimate

# Okabe and Ito's colours, safe for colour-blind readers; further groups repeat them with other strokes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", TEXT, "#56B4E9", "#E69F00")
STROKES: tuple[tuple[int, ...], ...] = ((), (7, 3), (3, 3))
DOTTED = (2, 2)
MAX_END_FACTOR = 1e3
SUMS = ("delta_h/cumulative_measured", "delta_h/cumulative_predicted")
NO_ERROR = "a logged number has no error"

Quantity = Callable[[Run], pd.DataFrame]
Mean = Callable[[Sequence[Estimate]], Estimate]
Look = tuple[str, tuple[int, ...]]  # colour, and lengths of dashes and gaps


def draw_overlays(groups: Sequence[Group], pairs: Sequence[final.Difference] = ()) -> list[Chart]:
    """Return the chart of entropy against reward, and one for each quantity that any group has."""
    trunks = trunks_of(groups)
    looks = {group.letter: _look(index) for index, group in enumerate(groups)}
    overlay = functools.partial(_overlay, groups, looks, trunks)
    charts = [
        draw_paths(groups, looks, pairs),
        overlay("reward", _reward, is_share=True),
        overlay("entropy", _entropy),
        overlay("change", _sum_of(SUMS[0]), dotted=_sum_of(SUMS[1])),
        overlay("noise_scale", final.noise_scales, mean=final.mean_noise_scale),
    ]
    for evaluation, metric in _evaluated_metrics(groups):
        quantity = _recorded(metric, evaluation)
        floor = 0.1 if metric == "length" else 0.0
        is_share = metric_info(metric).is_share
        charts.append(overlay("evaluated", quantity, is_share=is_share, floor=floor,
                              evaluation=evaluation.title, metric=metric))  # fmt: skip
    return [chart for chart in charts if chart is not None]


def _recorded(metric: str, source: Source = MEASURED) -> Quantity:
    return lambda run: run.finite_rows(metric, source)


def _sum_of(metric: str) -> Quantity:
    """Return a quantity: a sum over steps, without rows for a run that has only its initial 0."""

    def rows_of(run: Run) -> pd.DataFrame:
        rows = run.finite_rows(metric)
        return rows if len(rows) > len(sum_starts(run)) else rows.iloc[:0]

    return rows_of


def _overlay(
    groups: Sequence[Group], looks: Mapping[str, Look], trunks: Sequence[Run], key: str, quantity: Quantity,
    dotted: Quantity | None = None, mean: Mean = final.mean_over_runs, is_share: bool = False, floor: float = 0.0,
    **words: Any,
) -> Chart | None:  # fmt: skip
    """Return the chart with the curves of all groups; None if no run has any.

    Args:
        looks: Colour and stroke of each group, by its letter.
        dotted: Quantity drawn dotted, in addition to `quantity`.
        mean: Combines several runs at one step.
        is_share: As in `axis_limits`.
        floor: As in `axis_limits`.
        words: For the chart's texts.
    """
    having = [group for group in groups if any(len(quantity(member.run)) for member in group.members)]
    if not having:
        return None
    rows_of_curves = [finite(quantity(trunk)) for trunk in trunks]
    series = [Series("before they branch off", GREY, rows.index, rows["value"]) for rows in rows_of_curves]
    for group in having:
        color, stroke = looks[group.letter]
        curves, means = _curves(group, quantity, mean, color, stroke, group.name)
        series += curves
        rows_of_curves.append(means)
        if dotted:
            series += _curves(group, dotted, mean, color, DOTTED, f"{group.name}, predicted")[0]
    missing = [f"{group.name} – no run of it has recorded this" for group in groups if group not in having]
    finite_rows = finite(pd.concat(rows_of_curves))
    ends = axis_limits(finite_rows, is_share, floor) if len(finite_rows) else None
    branch_steps = branching_steps(groups)
    return draw(
        f"overlay_{key}", series, missing, ends, rules={"x": branch_steps}, branched=bool(branch_steps), **words
    )


def _curves(
    group: Group, quantity: Quantity, mean_of_runs: Mean, color: str, stroke: tuple[int, ...], label: str
) -> tuple[list[Series], pd.DataFrame]:
    """Return the group's mean with its band and thin lines for its runs; and the rows of the mean."""
    runs = {member.name: finite(rows) for member in group.members if len(rows := quantity(member.run))}
    mean_rows = to_rows(pool([to_estimates(rows) for rows in runs.values()], mean_of_runs))
    mean = finite(mean_rows)
    highest = MAX_END_FACTOR * mean["value"].abs().max()
    mean = mean.assign(high=mean["high"].clip(upper=highest))  # the frame cuts an infinite end
    series = [Series.of_rows(label, color, mean, "circle", dash=stroke)]
    singles = runs.items() if len(runs) > 1 else ()
    series += [
        Series(f"{label}: {name}", color, values.index, values["value"], opacity=0.35) for name, values in singles
    ]
    return series, mean_rows


def pool(runs: Sequence[Mapping[int, Estimate]], mean: Mean = final.mean_over_runs) -> dict[int, Estimate]:
    """Return the mean over runs at each step that all of them have, with the error between them; one run as it is."""
    if len(runs) < 2:
        return dict(runs[0]) if runs else {}
    return {step: mean([run[step] for run in runs]) for step in sorted(set.intersection(*map(set, runs)))}


def _reward(run: Run) -> pd.DataFrame:
    rows = run.finite_rows("reward", LOGGED)
    smooth = rows["value"].rolling(running_window(len(rows)), center=True, min_periods=1).mean()
    return rows.assign(value=smooth, reason=NO_ERROR)


def _entropy(run: Run) -> pd.DataFrame:
    rows = run.token_entropy_rows()
    return rows.assign(reason=NO_ERROR) if run.entropy_is_the_trainers else rows


def _evaluated_metrics(groups: Sequence[Group]) -> list[tuple[Source, str]]:
    """Return the (evaluation, metric) pairs to draw: those with a title, pass@1 and pass@k with the largest k."""
    runs = [member.run for group in groups for member in group.members]
    sources = {source for run in runs for source in run.evaluations_of_all}
    pairs = []
    for source in sorted(sources, key=lambda source: source.title):
        names = {name for run in runs for name in run.names(source) if len(run.finite_rows(name, source))}
        passes = {"pass_at": ["pass_at_1", largest_pass_at(names)]}
        titled = [
            metric for name, info in BUILT_IN_METRICS.items() if info.title for metric in passes.get(name, [name])
        ]
        candidates = ["reward"] if source == TRAINERS_EVALUATION else dict.fromkeys(titled)
        pairs += [(source, metric) for metric in candidates if metric in names]
    return pairs


def _look(index: int) -> Look:
    return COLORS[index % len(COLORS)], STROKES[index // len(COLORS) % len(STROKES)]
