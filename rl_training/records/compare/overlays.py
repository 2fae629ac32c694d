"""The charts of a comparison: a quantity's curves of all groups in one frame, and reward against entropy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from rl_training.mathematics.estimate import Estimate
from rl_training.records.compare.final import FittedLaw, mean_noise_scale, mean_over_runs, noise_scales
from rl_training.records.compare.groups import Group, branching_steps
from rl_training.records.evaluated import IN_TRAINING, largest_pass_at
from rl_training.records.report.charts import GREY, TEXT, Axis, Chart, Series, draw
from rl_training.records.report.curves import running_window
from rl_training.records.report.series import Measurements, Run, curve, finite

# Okabe and Ito's colours, which everyone can tell apart, and then the same in other strokes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", TEXT, "#56B4E9", "#E69F00")
STROKES: tuple[tuple[int, ...], ...] = ((), (7, 3), (3, 3))
DOTTED = (2, 2)
MARGIN = 0.02  # of a frame beyond 0 and 1, for the line's own width
EVALUATED = ("reward", "greedy_accuracy", "pass_at_1", "majority", "entropy/token", "kl/token", "length")
SHARES = ("reward", "greedy_accuracy", "pass_at_", "majority", "truncated", "format")  # a reward mostly is one
FAR = 1e3
MARKED = 12  # of fewer values, each is marked: of checkpoints, say
BAND = (
    "Bands are 95 % intervals: between seeds where a group has several (thin lines are its runs), else within the run. "
    "The frame fits the curves and may cut off wide bands. A dotted vertical line marks where runs branch off."
)

Quantity = Callable[[Run], Measurements]
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

        def evaluated(run: Run, evaluation: str = evaluation, metric: str = metric) -> Measurements:
            return finite(run.evaluations.get(evaluation, {}).get(metric, {}))

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
    having = [group for group in groups if any(quantity(member.run) for member in group.members)]
    if not having:
        return None
    framed = [e for group in having for trunk in group.trunks for e in quantity(trunk.run).values()]
    series = _trunks(groups, quantity)
    for group in having:
        color, stroke = _look(groups.index(group))
        curves, means = _curves(group, quantity, mean, color, stroke, group.name)
        series += curves
        framed += means
        if dotted:
            series += _curves(group, dotted, mean, color, DOTTED, f"{group.name}, predicted")[0]
    missing = [f"{group.name} – no run of it has recorded this" for group in groups if group not in having]
    y = Axis(label, ends=_frame(framed, share, floor))
    return draw(name, title, BAND, missing, series, y, rules={"x": branching_steps(groups)})


def _trunks(groups: Sequence[Group], quantity: Quantity) -> list[Series]:
    """Returns what runs have branched off from, once, where it is not compared itself."""
    trunks = {(trunk.run.folder, trunk.last_step): trunk for group in groups for trunk in group.trunks}
    found = [curve(quantity(trunk.run)) for trunk in trunks.values()]
    return [Series("before they branch off", GREY, drawn.steps, drawn.values) for drawn in found]


def _curves(
    group: Group, quantity: Quantity, mean_of_runs: Mean, color: str, stroke: tuple[int, ...], label: str
) -> tuple[list[Series], list[Estimate]]:
    """Returns the group's mean with its band, thin lines of its runs; and the means."""
    runs = [measured for member in group.members if (measured := quantity(member.run))]
    pooled = pool(runs, mean_of_runs)
    mean = curve(pooled)
    mark = "circle" if len(mean.steps) < MARKED else ""
    far = FAR * max(map(abs, mean.values), default=0.0)  # the frame cuts an infinite end
    highs = [min(high, far) for high in mean.highs]
    series = [Series(label, color, mean.steps, mean.values, mean.lows, highs, mark=mark, dash=stroke)]
    singles = [curve(measured) for measured in runs] if len(runs) > 1 else []
    series += [Series(f"{label}: a run", color, one.steps, one.values, faint=0.35) for one in singles]
    return series, list(pooled.values())


def _frame(means: Sequence[Estimate], share: bool, floor: float) -> tuple[float, float] | None:
    """Returns the frame by the means and typical bands: a few wide bands would press all curves into one line.

    Differences that are small beside the errors stay small: nothing is magnified to its own noise.
    """
    if not means or not all(math.isfinite(mean.value) for mean in means):
        return None
    values = [mean.value for mean in means]
    least = floor * statistics.median(map(abs, values))
    below = max(least, _room(means, [mean.value - mean.ends()[0] for mean in means]))
    above = max(least, _room(means, [mean.ends()[1] - mean.value for mean in means]))
    low, high = min(values) - below, max(values) + above
    if share:
        return max(low, min(0.0, *values) - MARGIN), min(high, max(1.0, *values) + MARGIN)
    return low, high


def _room(means: Sequence[Estimate], reaches: Sequence[float]) -> float:
    """Returns how much there is to be beyond the curves on one side, by how far their bands reach there."""
    values = [mean.value for mean in means]
    span = max(values) - min(values)
    reach = statistics.median([known for known in reaches if math.isfinite(known)] or [0.0])
    stderr = statistics.median([mean.stderr for mean in means if math.isfinite(mean.stderr)] or [0.0])
    room = min(max(1.5 * reach, 0.1 * span), span or math.inf)
    return max(room, min(2 * stderr, reach)) or abs(values[0]) or 1.0


def pool(runs: Sequence[Measurements], mean: Mean = mean_over_runs) -> dict[int, Estimate]:
    """Returns the mean over runs at each step that all of them have, its error between them; of one run, that run."""
    if len(runs) < 2:
        return dict(runs[0]) if runs else {}
    known = [finite(measured) for measured in runs]
    return {step: mean([measured[step] for measured in known]) for step in sorted(set.intersection(*map(set, known)))}


def _reward(run: Run) -> Measurements:
    values = pd.Series(run.logged("reward"), dtype=float)
    smooth = values.rolling(running_window(len(values)), center=True, min_periods=1).mean()
    return _without_errors(zip(smooth.index, smooth, strict=True))


def _entropy(run: Run) -> Measurements:
    return run.measured("entropy/token") or _without_errors(run.logged("entropy").items())


def _without_errors(values: Iterable[tuple[int, float]]) -> Measurements:
    return {step: Estimate(value, reason="a logged number has no error") for step, value in values}


def _evaluated_metrics(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Returns the (evaluation, metric) that are drawn: those of EVALUATED, and pass@k at the largest k."""
    found: dict[str, set[str]] = {}
    for member in (member for group in groups for member in group.members):
        for evaluation, metrics in member.run.evaluations.items():
            found.setdefault(evaluation, set()).update(name for name in metrics if finite(metrics[name]))
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
        _, entropies, rewards = zip(*fitted.points, strict=True)
        grid = np.linspace(0, max(entropies), 60).tolist()
        on_curve = [fitted.law.reward(entropy) for entropy in grid]
        lows, highs = zip(*(e.ends() for e in on_curve), strict=True)
        series += [
            Series(name, color, grid, [e.value for e in on_curve], lows, highs, dash=stroke),
            Series(name, color, entropies, rewards, line=False, mark="circle", faint=0.7),
        ]
        if fitted.first:
            early = [fitted.first.reward(entropy).value for entropy in grid]
            series.append(Series(f"{name}, first half", color, grid, early, dash=DOTTED))
    too_high = [law.most for law in drawn if law.leads_too_high]
    if too_high:
        ends = [0.0, max(point.entropy for law in drawn for point in law.points)]
        series.append(Series("the most a response earns", GREY, ends, [max(too_high)] * 2, dash=(5, 3)))
    caption = (
        "A policy moves from right to left. Where the curve meets H = 0 there is no entropy left to spend: the reward "
        "there is the ceiling of this training. Dotted: the same fit to the first half of the steps only. The 95 % "
        "bands assume that points scatter independently about the curve."
    )
    missing = [f"{law.group.name} – {law.reason}" for law in laws if not law.law]
    title, x, y = "Reward against entropy: R = −a e^H + b", Axis("token entropy (nats)"), Axis("mean reward")
    return draw("law", title, caption, missing, series, y, x, rules={"x": [0]})


def _look(index: int) -> tuple[str, tuple[int, ...]]:
    return COLORS[index % len(COLORS)], STROKES[index // len(COLORS) % len(STROKES)]
