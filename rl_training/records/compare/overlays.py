"""The pictures of a comparison: a quantity's curves of all groups in one frame, and reward against entropy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rl_training.mathematics.estimate import Estimate
from rl_training.records.compare.final import FittedLaw, mean_noise_scale, mean_over_runs, noise_scales
from rl_training.records.compare.groups import Group, branching_steps
from rl_training.records.evaluated import IN_TRAINING, largest_pass_at
from rl_training.records.report.drawing import BAND_OF, GREY, Picture, frame_shares, legend, picture, running_window
from rl_training.records.report.series import Measurements, Run, curve, finite

# Okabe and Ito's colours, which everyone can tell apart, and then the same in other strokes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
STROKES = ("-", "--", ":")
DOTTED = (0, (1, 1))
EVALUATED = ("reward", "greedy_accuracy", "pass_at_1", "majority", "entropy/token", "kl/token", "length")
SHARES = ("reward", "greedy_accuracy", "pass_at_", "majority", "truncated", "format")  # a reward mostly is one
FAR = 1e3
MARKED = 12  # of fewer values, each is marked: of checkpoints, say
BAND = (
    "Bands are 95 % intervals: between seeds where a group has several (thin lines are its runs), else within the run. "
    "The frame fits the curves and may cut off wide bands. A dotted vertical line marks where runs branch off."
)

Series = Callable[[Run], Measurements]
Mean = Callable[[Sequence[Estimate]], Estimate]


def draw_overlays(groups: Sequence[Group]) -> list[Picture]:
    """Returns the pictures of what any of the groups has."""
    pictures = [
        _overlay(groups, "reward", "Reward", "mean reward, running mean", _reward, share=True),
        _overlay(groups, "entropy", "Entropy", "token entropy (nats)", _entropy),
        _overlay(groups, "change", "Change of entropy: measured, and predicted (dotted)",
                 "change since the first step\n(nats per token)", lambda run: run.known("delta_h/cumulative_measured"),
                 dotted=lambda run: run.known("delta_h/cumulative_predicted")),
        _overlay(groups, "noise_scale", "Gradient noise scale", "prompts", noise_scales, mean=mean_noise_scale),
    ]  # fmt: skip
    for evaluation, metric in _evaluated_metrics(groups):

        def evaluated(run: Run, of: tuple[str, str] = (evaluation, metric)) -> Measurements:
            return finite(run.evaluations.get(of[0], {}).get(of[1], {}))

        file, title = f"{evaluation}_{metric}", f"Evaluation “{evaluation}”: {metric}"
        share, floor = metric.startswith(SHARES), 0.1 if metric == "length" else 0.0
        pictures.append(_overlay(groups, file, title, metric, evaluated, share=share, floor=floor))
    return [drawn for drawn in pictures if drawn is not None]


def _overlay(
    groups: Sequence[Group],
    file: str,
    title: str,
    label: str,
    series: Series,
    dotted: Series | None = None,
    mean: Mean = mean_over_runs,
    share: bool = False,
    floor: float = 0.0,
) -> Picture | None:
    """Returns the picture of the curves of all groups; None when no run has any.

    dotted  drawn beside `series`
    mean    of several runs at a step
    share   the frame does not go beyond 0 and 1 where no curve does
    floor   the frame goes beyond the curves by this part of their height at least: a token of 200 is no news
    """
    having = [group for group in groups if any(series(member.run) for member in group.members)]
    if not having:
        return None

    def draw(axes: Axes) -> None:
        framed = [e for group in having for trunk in group.trunks for e in series(trunk.run).values()]
        for group in having:
            color, stroke = _look(groups.index(group))
            framed += _draw_group(axes, group, series, mean, color, stroke, group.name)
            if dotted:
                _draw_group(axes, group, dotted, mean, color, DOTTED, None)
        _draw_trunks(axes, groups, series)
        _frame_the_means(axes, framed, share, floor)
        axes.set_ylabel(label)
        legend(axes)

    missing = [f"{group.name} – no run of it has recorded this" for group in groups if group not in having]
    return picture(f"{file}.png", title, BAND, missing, draw, height=4 + 0.13 * len(having))


def _draw_trunks(axes: Axes, groups: Sequence[Group], series: Series) -> None:
    """Draws what runs have branched off from, once, where it is not compared itself, and the steps where they have."""
    trunks = {(trunk.run.folder, trunk.last_step): trunk for group in groups for trunk in group.trunks}
    for number, trunk in enumerate(trunks.values()):
        drawn = curve(series(trunk.run))
        axes.plot(drawn.steps, drawn.values, color=GREY, lw=2, label=None if number else "before they branch off")
    for step in branching_steps(groups):
        axes.axvline(step, color=GREY, lw=1, ls=(0, (1, 2)))


def _draw_group(
    axes: Axes, group: Group, series: Series, mean_runs: Mean, color: str, stroke: object, label: str | None
) -> list[Estimate]:
    """Draws the group's mean with its band, and thin lines of its runs; returns the means."""
    runs = [measured for member in group.members if (measured := series(member.run))]
    if len(runs) > 1:
        for measured in runs:
            drawn = curve(measured)
            axes.plot(drawn.steps, drawn.values, "-", color=color, lw=0.8, alpha=0.35)
    pooled = pool(runs, mean_runs)
    mean = curve(pooled)
    marker = "o" if len(mean.steps) < MARKED else ""
    axes.plot(mean.steps, mean.values, ls=stroke, color=color, lw=2, label=label, marker=marker, ms=5)
    highs = np.minimum(mean.highs, FAR * max(map(abs, mean.values), default=0.0))  # the frame cuts an infinite end
    axes.fill_between(mean.steps, mean.lows, highs, color=color, alpha=0.14, lw=0, label=f"{BAND_OF}{label}")
    return list(pooled.values())


def _frame_the_means(axes: Axes, means: Sequence[Estimate], share: bool, floor: float) -> None:
    """Sets the frame by the means and typical bands: a few wide bands would press all curves into one line.

    Differences that are small beside the errors stay small: nothing is magnified to its own noise.
    """
    if not means or not all(math.isfinite(mean.value) for mean in means):
        return
    values = [mean.value for mean in means]
    least = floor * statistics.median(map(abs, values))
    below = max(least, _room(means, [mean.value - mean.ends()[0] for mean in means]))
    above = max(least, _room(means, [mean.ends()[1] - mean.value for mean in means]))
    axes.set_ylim(min(values) - below, max(values) + above)
    if share:
        frame_shares(axes, values)


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


def draw_law(groups: Sequence[Group], laws: Sequence[FittedLaw]) -> Picture:
    """Returns reward against entropy, with the fitted curves, their bands, and their ceilings at H = 0."""
    drawn = [law for law in laws if law.law]

    def draw(axes: Axes) -> None:
        for fitted in drawn:
            assert fitted.law
            color, stroke = _look(groups.index(fitted.group))
            _, entropies, rewards = zip(*fitted.points, strict=True)
            axes.plot(entropies, rewards, "o", color=color, ms=5, alpha=0.7, mew=0)
            grid = np.linspace(0, max(entropies), 60)
            on_curve = [fitted.law.reward(entropy) for entropy in grid]
            axes.plot(grid, [e.value for e in on_curve], ls=stroke, color=color, lw=2, label=fitted.group.name)
            lows, highs = zip(*(e.ends() for e in on_curve), strict=True)
            axes.fill_between(grid, lows, highs, color=color, alpha=0.14, lw=0)
            if fitted.first:
                axes.plot(grid, [fitted.first.reward(h).value for h in grid], ls=DOTTED, color=color, lw=1.5)
        axes.axvline(0, color=GREY, lw=1)
        too_high = [law.most for law in drawn if law.leads_too_high]
        if too_high:
            axes.axhline(max(too_high), color=GREY, lw=1.5, ls="--", label="the most a response earns")
        axes.set_xlabel("token entropy (nats)")
        axes.set_ylabel("mean reward")
        legend(axes)

    caption = (
        "A policy moves from right to left. Where the curve meets H = 0 there is no entropy left to spend: the reward "
        "there is the ceiling of this training. Dotted: the same fit to the first half of the steps only. The 95 % "
        "bands assume that points scatter independently about the curve."
    )
    missing = [f"{law.group.name} – {law.reason}" for law in laws if not law.law]
    return picture("law.png", "Reward against entropy: R = −a e^H + b", caption, missing, draw if drawn else None,
                   height=4 + 0.13 * len(drawn), over_steps=False)  # fmt: skip


def _look(index: int) -> tuple[str, str]:
    return COLORS[index % len(COLORS)], STROKES[index // len(COLORS) % len(STROKES)]
