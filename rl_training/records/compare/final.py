"""Final figures of groups of runs with their errors, and differences between groups with theirs.

Error of a group. With n ≥ 2 seeds: between seeds, se = sd/√n with n − 1 degrees of freedom. This includes everything
that varies with the seed. With one seed: within the run (over the averaged steps, the folds of a probe, the prompts of
an evaluation). This excludes variation between seeds, and the page says so.

Step. A group is evaluated at the last step that two of its runs have reached (a single run: at its last step). Seeds
that ended earlier are left out, of entropy at equal reward too. Two groups are compared at the earlier of their steps.

Noise scale B. For several seeds it is 1 / the mean of 1/B, the signal-to-noise ratio, with the inverted interval of
that mean. For one seed it has Fieller's interval, as in the run's own report.

Differences ignore that the same seeds in two groups share data and initial weights (statistics/welch.py). If anything,
their intervals are too wide. Means over logged steps cover the same steps in both groups.

Changes of entropy of runs that branched off from one run have errors of their own: since_branching.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import pandas as pd

from rl_training.records.compare.equal_reward import EqualReward, at_equal_reward
from rl_training.records.compare.groups import Group, other_task
from rl_training.records.compare.members import Member
from rl_training.records.compare.since_branching import MEASURED, PREDICTED, since_branching
from rl_training.records.table.cumulative import sum_starts
from rl_training.records.table.estimates import finite, last_of
from rl_training.records.table.series import TRAINERS_EVALUATION, Run
from rl_training.records.table.trends import MAX_WINDOW
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.noise_scale import noise_scale_interval
from rl_training.statistics.welch import difference, mean_of

NOISE_SCALE = "noise scale (prompts)"
# Metrics of the trainer's own evaluations. Everything else that it logs there is about clipping and time.
FROM_TRAINING = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "completions/mean_length")
TOKEN_ENTROPY = "token entropy"
MANY_GROUPS = 4  # from this number on, each is compared with the first only
# Figures that are means over the last steps with a value: not always the same steps, since a probe may measure less
# often than the trainer logs.
AVERAGED: dict[str, Callable[[Run], pd.Series[float]]] = {
    "reward": lambda run: run.logged("reward"),
    TOKEN_ENTROPY: Run.token_entropy,
}


@dataclass(frozen=True)
class Difference:
    """The second group minus the first, at `step`.

    `windows` are the first and the last step that the means of reward and of entropy cover, by label.
    """

    first: Group
    second: Group
    step: int
    figures: dict[str, Estimate]
    single_seed: bool  # one group has a single seed at `step`: the error excludes the spread between seeds
    windows: dict[str, tuple[int, int]]
    other_task: list[str]  # settings that make their rewards different quantities
    equal_reward: EqualReward


def last_common_step(group: Group) -> int:
    """Return the last step that two of the group's runs have reached; for a single run, its last step."""
    return sorted((member.last_step for member in group.members), reverse=True)[:2][-1]


@dataclass(frozen=True)
class Column:
    """A group at a step, as a column of the table of final figures.

    Args:
        since: First step that means may cover: the one at which all compared runs have begun.
        heading: Of the column.
    """

    group: Group
    step: int
    since: int = 0
    heading: str = ""

    @property
    def members(self) -> list[Member]:
        """The runs of the group that have reached the step."""
        return [member for member in self.group.members if member.last_step >= self.step]


def columns_at(groups: Sequence[Group], step: int) -> list[Column]:
    """Return the groups at this step. Means may cover steps from the first one that all of their runs have recorded."""
    columns = [Column(group, step, heading=group.name) for group in groups]
    since = max(member.run.steps[0] for column in columns for member in column.members)
    return [replace(column, since=since) for column in columns]


def final_figures(column: Column) -> dict[str, Estimate]:
    """Return the group's figures at the step by label. A figure that one of its runs lacks is left out."""
    runs = [figures_of(member.run, column.step, column.since) for member in column.members]
    common = {
        label: [figures[label] for figures in runs]
        for label in runs[0]
        if all(label in run_figures for run_figures in runs)
    }
    means = {NOISE_SCALE: mean_noise_scale}
    return {
        label: means.get(label, mean_over_runs)(values) if len(values) > 1 else values[0]
        for label, values in common.items()
    }


def figures_of(run: Run, step: int, since: int = 0) -> dict[str, Estimate]:
    """Return one run's figures at `step`: means over the last logged steps, a probe's sums, the last evaluation."""
    measured = run.finite_rows("delta_h/cumulative_measured")
    measured = measured[measured.index <= step].drop(sum_starts(run), errors="ignore")  # sums begin with 0
    # At the same step: an earlier sum does not predict a later change.
    predicted = run.finite_rows("delta_h/cumulative_predicted")
    predicted = predicted[predicted.index.isin(measured.index[-1:])]
    rows = {MEASURED: measured, PREDICTED: predicted, NOISE_SCALE: noise_scales(run)}
    for evaluation in sorted(run.evaluations_of_all, key=lambda source: source.title):
        for metric in sorted(run.names(evaluation)):
            if evaluation != TRAINERS_EVALUATION or metric in FROM_TRAINING:
                rows[f"{metric} · {evaluation.title}"] = run.rows(metric, evaluation)
    figures = {
        **{label: _mean_until(values(run), step, since) for label, values in AVERAGED.items()},
        **{label: last_of(series[series.index <= step]) for label, series in rows.items()},
    }
    return {label: figure for label, figure in figures.items() if figure and math.isfinite(figure.value)}


def compare_groups(groups: Sequence[Group]) -> list[Difference]:
    """Return the differences of all pairs of groups; with MANY_GROUPS or more, those of each group from the first."""
    pairs = combinations(groups, 2) if len(groups) < MANY_GROUPS else ((groups[0], other) for other in groups[1:])
    differences = []
    for first, second in pairs:
        step = min(last_common_step(first), last_common_step(second))
        columns = columns_at((first, second), step)
        first_figures = final_figures(columns[0])
        second_figures = final_figures(columns[1])
        figures = {
            label: difference(second_figures[label], figure)
            for label, figure in first_figures.items()
            if label in second_figures
        }
        figures |= since_branching(columns[0].members, columns[1].members, step)
        single_seed = any(len(column.members) < 2 for column in columns)
        task = other_task(first, second)
        windows = {label: _window(columns, values) for label, values in AVERAGED.items()}
        equal = at_equal_reward(columns[0].members, columns[1].members)
        differences.append(Difference(first, second, step, figures, single_seed, windows, task, equal))
    return differences


def _window(columns: Sequence[Column], values: Callable[[Run], pd.Series[float]]) -> tuple[int, int]:
    """Return the first and the last step that the means over the last steps of these runs cover."""
    indices = [
        last_steps(values(member.run), column.step, column.since).index
        for column in columns
        for member in column.members
    ]
    ends = [int(index[place]) for index in indices if len(index) for place in (0, -1)] or [columns[0].step]
    return min(ends), max(ends)


def _mean_until(values: pd.Series[float], step: int, since: int) -> Estimate:
    """Return the mean over the last few logged steps up to `step`. Its error is their scatter, which a trend widens."""
    return mean_of(last_steps(values, step, since).tolist())


def last_steps(values: pd.Series[float], step: int, since: int) -> pd.Series[float]:
    """Return the values of the last MAX_WINDOW logged steps up to `step`, or of half of them in a shorter run."""
    recent = values[(values.index >= since) & (values.index <= step)]
    return recent.tail(min(MAX_WINDOW, max(len(recent) // 2, 1)))


def mean_over_runs(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over several runs, with the error between them.

    If all runs have the same value with an interval, such as a share of 0 or 1, return one run's estimate.
    """
    if len({estimate.value for estimate in estimates}) == 1 and all(estimate.interval for estimate in estimates):
        return estimates[0]
    return mean_of([estimate.value for estimate in estimates])


def noise_scales(run: Run) -> pd.DataFrame:
    """Return the noise scale by step, in prompts, with Fieller's interval, unless the step's |G|² is lost in noise."""
    rows = finite(run.with_interval("gns/noise_scale_prompts"))
    return rows[rows["value"] > 0]


def mean_noise_scale(scales: Sequence[Estimate]) -> Estimate:
    """Return 1 / the mean of 1/B over runs, with the inverted interval of that mean: up to ∞ if it contains 0.

    Example: for 100 and 300 it is 150.
    """
    ratio = mean_of([1 / scale.value for scale in scales])
    ends = None if math.isnan(ratio.stderr) else noise_scale_interval(ratio.bounds())
    return Estimate(1 / ratio.value, num_samples=ratio.num_samples, reason=ratio.reason, interval=ends)
