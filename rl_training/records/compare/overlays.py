"""The charts of a comparison: a quantity's curves of all groups in one frame, and reward against entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from rl_training.mathematics.estimate import Estimate
from rl_training.records.compare.final import FittedLaw, mean_noise_scale, mean_over_runs, noise_scales
from rl_training.records.compare.groups import Group, branching_steps
from rl_training.records.evaluated import IN_TRAINING, largest_pass_at
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report.charts import GREY, TEXT, Chart, Series, draw, framed
from rl_training.records.report.figures import running_window
from rl_training.records.report.series import Run, finite, to_estimates, to_rows

# Okabe and Ito's colours, which everyone can tell apart, and then the same in other strokes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", TEXT, "#56B4E9", "#E69F00")
STROKES: tuple[tuple[int, ...], ...] = ((), (7, 3), (3, 3))
DOTTED = (2, 2)
EVALUATED = ("reward", "greedy_accuracy", "pass_at_1", "majority", "entropy/token", "kl/token", "length")
SHARES = ("reward", "greedy_accuracy", "pass_at_", "majority", "truncated", "format")  # a reward mostly is one
FAR = 1e3
NO_ERROR = "a logged number has no error"
MARKED = 12  # of fewer values, each is marked: of checkpoints, say

Quantity = Callable[[Run], pd.DataFrame]
Mean = Callable[[Sequence[Estimate]], Estimate]


def draw_overlays(groups: Sequence[Group]) -> list[Chart]:
    """Returns the charts of what any of the groups has."""
    charts = [
        _overlay(groups, "reward", "Reward", "mean reward, running mean", _reward, share=True),
        _overlay(groups, "entropy", "Entropy", "token entropy (nats)", _entropy),
        _overlay(groups, "change", "Change of entropy: measured, and predicted (dotted)",
                 "change since the first step (nats per token)", lambda run: run.known("delta_h/cumulative_measured"),
                 dotted=lambda run: run.known("delta_h/cumulative_predicted")),
        _overlay(groups, "noise_scale", "Gradient noise scale", "prompts", noise_scales, mean=mean_noise_scale),
    ]  # fmt: skip
    for evaluation, metric in _evaluated_metrics(groups):

        def evaluated(run: Run, evaluation: str = evaluation, metric: str = metric) -> pd.DataFrame:
            return run.known(metric, evaluation)

        name, title = f"{evaluation}_{metric}", f"Evaluation “{evaluation}”: {metric}"
        share, floor = metric.startswith(SHARES), 0.1 if metric == "length" else 0.0
        charts.append(_overlay(groups, name, title, metric, evaluated, share=share, floor=floor))
    return [drawn for drawn in charts if drawn is not None]


def _overlay(
    groups: Sequence[Group],
    name: str,
    title: str,
    label: str,
    quantity: Quantity,
    dotted: Quantity | None = None,
    mean: Mean = mean_over_runs,
    share: bool = False,
    floor: float = 0.0,
) -> Chart | None:
    """Returns the chart of the curves of all groups; None when no run has any.

    dotted  drawn beside `quantity`
    mean    of several runs at a step
    share   the frame does not go beyond 0 and 1 where no curve does
    floor   the frame goes beyond the curves by this part of their height at least: a token of 200 is no news
    """
    having = [group for group in groups if any(len(quantity(member.run)) for member in group.members)]
    if not having:
        return None
    shown = [quantity(trunk.run) for group in having for trunk in group.trunks]
    series = _trunks(groups, quantity)
    for group in having:
        color, stroke = _look(groups.index(group))
        curves, means = _curves(group, quantity, mean, color, stroke, group.name)
        series += curves
        shown.append(means)
        if dotted:
            series += _curves(group, dotted, mean, color, DOTTED, f"{group.name}, predicted")[0]
    missing = [f"{group.name} – no run of it has recorded this" for group in groups if group not in having]
    known = finite(pd.concat(shown))
    ends, rules = framed(known, share, floor) if len(known) else None, {"x": branching_steps(groups)}
    return draw("overlay", series, missing, name=name, ends=ends, rules=rules, title=title, label=label)


def _trunks(groups: Sequence[Group], quantity: Quantity) -> list[Series]:
    """Returns what runs have branched off from, once, where it is not compared itself."""
    trunks = {(trunk.run.folder, trunk.last_step): trunk for group in groups for trunk in group.trunks}
    found = [finite(quantity(trunk.run)) for trunk in trunks.values()]
    return [Series("before they branch off", GREY, rows.index, rows["value"]) for rows in found]


def _curves(
    group: Group, quantity: Quantity, mean_of_runs: Mean, color: str, stroke: tuple[int, ...], label: str
) -> tuple[list[Series], pd.DataFrame]:
    """Returns the group's mean with its band, thin lines of its runs; and the means."""
    runs = [finite(rows) for member in group.members if len(rows := quantity(member.run))]
    pooled = to_rows(pool([to_estimates(rows) for rows in runs], mean_of_runs))
    mean = finite(pooled)
    mean = mean.assign(high=mean["high"].clip(upper=FAR * mean["value"].abs().max()))  # the frame cuts an infinite end
    series = [Series.of_rows(label, color, mean, mark="circle" if len(mean) < MARKED else "", dash=stroke)]
    singles = runs if len(runs) > 1 else []
    series += [Series(f"{label}: a run", color, one.index, one["value"], faint=0.35) for one in singles]
    return series, pooled


def pool(runs: Sequence[Mapping[int, Estimate]], mean: Mean = mean_over_runs) -> dict[int, Estimate]:
    """Returns the mean over runs at each step that all of them have, its error between them; of one run, that run."""
    if len(runs) < 2:
        return dict(runs[0]) if runs else {}
    return {step: mean([run[step] for run in runs]) for step in sorted(set.intersection(*map(set, runs)))}


def _reward(run: Run) -> pd.DataFrame:
    rows = run.known("reward", METRICS_FILE)
    smooth = rows["value"].rolling(running_window(len(rows)), center=True, min_periods=1).mean()
    return rows.assign(value=smooth, reason=NO_ERROR)


def _entropy(run: Run) -> pd.DataFrame:
    rows = run.measured("entropy/token")
    return rows if len(rows) else run.known("entropy", METRICS_FILE).assign(reason=NO_ERROR)


def _evaluated_metrics(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Returns the (evaluation, metric) that are drawn: those of EVALUATED, and pass@k at the largest k."""
    found: dict[str, set[str]] = {}
    for run in (member.run for group in groups for member in group.members):
        for evaluation in (IN_TRAINING, *run.evaluations):
            known = (name for name in run.names(evaluation) if len(run.known(name, evaluation)))
            found.setdefault(evaluation, set()).update(known)
    chosen = []
    for evaluation, names in sorted(found.items()):
        several = dict.fromkeys([*EVALUATED[:3], largest_pass_at(names), *EVALUATED[3:]])
        wanted = ("reward",) if evaluation == IN_TRAINING else several
        chosen += [(evaluation, metric) for metric in wanted if metric in names]
    return chosen


def draw_law(groups: Sequence[Group], laws: Sequence[FittedLaw]) -> Chart:
    """Returns reward against entropy, with the fitted curves, their bands, and their ceilings at H = 0."""
    drawn, series = [law for law in laws if law.law], []
    for fitted in drawn:
        assert fitted.law
        (color, stroke), name = _look(groups.index(fitted.group)), fitted.group.name
        grid = np.linspace(0, fitted.points["entropy"].max(), 60).tolist()
        on_curve = to_rows(dict(zip(grid, map(fitted.law.reward, grid), strict=True)))
        series += [
            Series.of_rows(name, color, on_curve, dash=stroke),
            Series.cloud(name, color, "circle", fitted.points["entropy"], fitted.points["reward"], faint=0.7),
        ]
        if fitted.first:
            early = [fitted.first.reward(entropy).value for entropy in grid]
            series.append(Series(f"{name}, first half", color, grid, early, dash=DOTTED))
    too_high = [law.most for law in drawn if law.leads_too_high]
    if too_high:
        ends = [0.0, max(law.points["entropy"].max() for law in drawn)]
        series.append(Series("the most a response earns", GREY, ends, [max(too_high)] * 2, dash=(5, 3)))
    return draw("law", series, [f"{law.group.name} – {law.reason}" for law in laws if not law.law])


def _look(index: int) -> tuple[str, tuple[int, ...]]:
    return COLORS[index % len(COLORS)], STROKES[index // len(COLORS) % len(STROKES)]
