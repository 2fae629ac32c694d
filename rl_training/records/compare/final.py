"""Final figures of groups of runs with their errors, and differences between groups with theirs.

A group's error. With n ≥ 2 seeds: between seeds, se = sd/√n with n − 1 degrees of freedom. It includes everything
that differs from seed to seed. With one seed: within the run (the steps that are averaged, the folds of a probe, the
prompts of an evaluation), which excludes variation between seeds; the page says so.

Step. A group is evaluated at the furthest step that two of its runs have reached (a single run: its last);
seeds that ended earlier are left out of its figures. Two groups are compared at the earlier of their steps.

Several seeds' noise scale is 1 / the mean of 1/B, the signal-to-noise ratio, with the ends of that mean's interval
turned over; one seed's has Fieller's interval, as its run's own report.

That the same seeds in two groups share data and initial weights is not used in differences (statistics/welch.py): it
makes the interval too wide, if anything. Means over logged steps are over the same steps in both.

Changes of entropy of two runs that are one run up to a branching point are compared from there on: the errors of the
steps before it are the same in both, and cancel. With `first`, the step after it, whose weights are the same in both,

measured    H(step) of one run − H(step) of the other: entropy at `first` is the same
predicted   Σ ½(F_j + B_{j+1}) over first ≤ j < step of each: ½F_first + Σ_{first<j<step} ½(F_j + B_j) + ½B_step, whose
            terms have independent errors (entropy/trapezoid.py). Σ v of their variances has the degrees of freedom
            of (Σ v)²/Σ v² batches (Satterthwaite)

The two runs' errors since then count as independent. That the batch at `first` is the same in both, and that later ones
share random numbers, makes the interval too wide, if anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import pandas as pd

from rl_training.records.compare.groups import Group, Member, common_steps
from rl_training.records.evaluated import IN_TRAINING
from rl_training.records.report.findings import MAX_WINDOW, origins
from rl_training.records.report.series import Run, finite, last_of
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.noise_scale import noise_scale_interval
from rl_training.statistics.welch import difference, mean_of

MEASURED, PREDICTED, NOISE_SCALE = "measured ΔH", "predicted ΔH", "noise scale (prompts)"
# Of the trainer's own evaluations: what it logs beside these is of its clipping and its clock.
FROM_TRAINING = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "completions/mean_length")
MANY_GROUPS = 4  # with so many, each is held against the first only
NOT_RECORDED = Estimate.missing("it is not recorded")


@dataclass(frozen=True)
class Difference:
    """The second group minus the first, at `step`."""

    first: Group
    second: Group
    step: int
    figures: dict[str, Estimate]
    single_seed: bool  # of one of them there: the spread between seeds is not in the error


def last_common_step(group: Group) -> int:
    """Return the furthest step that two of the group's runs have reached; of a single run, its last."""
    return sorted((member.last_step for member in group.members), reverse=True)[:2][-1]


def members_at(group: Group, step: int) -> list[Member]:
    """Return the runs of the group that have reached this step."""
    return [member for member in group.members if member.last_step >= step]


def final_figures(group: Group, step: int, since: int = 0) -> dict[str, Estimate]:
    """Return the group's figures at `step` by their labels: those that all of its runs there have.

    since  where all runs that these are compared with have begun: no mean is over an earlier step
    """
    runs = [figures_of(member.run, step, since) for member in members_at(group, step)]
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


def begun(groups: Sequence[Group], step: int) -> int:
    """Return the step from which on all runs of these groups that have reached `step` are recorded."""
    return max(member.run.steps[0] for group in groups for member in members_at(group, step))


def figures_of(run: Run, step: int, since: int = 0) -> dict[str, Estimate]:
    """Return one run's figures at `step`: means over the last logged steps, sums of a probe, the last evaluation."""
    measured = run.known("delta_h/cumulative_measured")
    measured = measured[measured.index <= step].drop(origins(run), errors="ignore")  # the 0 that they begin with
    # Of the same steps: an earlier sum is no prediction of a later change.
    predicted = run.known("delta_h/cumulative_predicted")
    predicted = predicted[predicted.index.isin(measured.index[-1:])]
    rows = {MEASURED: measured, PREDICTED: predicted, NOISE_SCALE: noise_scales(run)}
    for evaluation in sorted((IN_TRAINING, *run.evaluations)):
        for metric in sorted(run.names(evaluation)):
            if evaluation != IN_TRAINING or metric in FROM_TRAINING:
                rows[f"{metric} · {evaluation}"] = run.measured(metric, evaluation)
    figures = {
        "reward": _mean_until(run.logged("reward"), step, since),
        "token entropy": _mean_until(run.token_entropy(), step, since),
        **{label: last_of(series[series.index <= step]) for label, series in rows.items()},
    }
    return {label: figure for label, figure in figures.items() if figure and math.isfinite(figure.value)}


def compare_groups(groups: Sequence[Group]) -> list[Difference]:
    """Return the differences of all pairs of groups; of MANY_GROUPS or more, of each from the first."""
    pairs = combinations(groups, 2) if len(groups) < MANY_GROUPS else ((groups[0], other) for other in groups[1:])
    differences = []
    for first, second in pairs:
        step = min(last_common_step(first), last_common_step(second))
        since = begun((first, second), step)
        before, after = final_figures(first, step, since), final_figures(second, step, since)
        common = {label: difference(after[label], before[label]) for label in before if label in after}
        common |= since_branching(members_at(first, step), members_at(second, step), step)
        single_seed = any(len(members_at(group, step)) < 2 for group in (first, second))
        differences.append(Difference(first, second, step, common, single_seed))
    return differences


def _mean_until(values: pd.Series[float], step: int, since: int) -> Estimate:
    """Return the mean over the last few logged steps up to `step`; its error is their scatter: a trend widens it."""
    known = values[(values.index >= since) & (values.index <= step)]
    return mean_of(known.tail(min(MAX_WINDOW, max(len(known) // 2, 1))).tolist())


def mean_over_runs(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of several runs with the error between them; of shares that are all 0 or 1, one's interval."""
    if len({estimate.value for estimate in estimates}) == 1 and all(estimate.interval for estimate in estimates):
        return estimates[0]
    return mean_of([estimate.value for estimate in estimates])


def noise_scales(run: Run) -> pd.DataFrame:
    """Return the noise scale by step, in prompts, with Fieller's interval; where |G|² was not lost in noise."""
    rows = finite(run.with_interval("gns/noise_scale_prompts"))
    return rows[rows["value"] > 0]


def mean_noise_scale(scales: Sequence[Estimate]) -> Estimate:
    """Return 1 / the mean of 1/B over runs, with the interval of that mean turned over: to ∞ where it holds 0.

    Example: of 100 and 300 it is 150.
    """
    ratio = mean_of([1 / scale.value for scale in scales])
    ends = None if math.isnan(ratio.stderr) else noise_scale_interval(ratio.bounds())
    return Estimate(1 / ratio.value, num_samples=ratio.num_samples, reason=ratio.reason, interval=ends)


def since_branching(first: Sequence[Member], second: Sequence[Member], step: int) -> dict[str, Estimate]:
    """Return second − first of the changes of entropy since their branching points; nothing where they share no steps.

    Several runs are pairs, each of them in one: the mean over pairs, with the error between pairs.
    """
    pairs = [(member.run, other.run, common_steps(member, other) + 1) for member in first for other in second]
    branched = [(member, other, start) for member, other, start in pairs if start > 1]
    if not len(branched) == len(first) == len(second):
        return {}
    changes = {}
    for label, change in ((MEASURED, _measured_since), (PREDICTED, _predicted_since)):
        apart = [
            difference(change(other, start, step), change(member, start, step)) for member, other, start in branched
        ]
        if all(math.isfinite(e.value) for e in apart):
            changes[label] = apart[0] if len(apart) == 1 else mean_of([e.value for e in apart])
    return changes


def _measured_since(run: Run, start: int, step: int) -> Estimate:
    """Return H(step); the 0 ± 0 by which it has changed at `start`, where the weights of both runs are the same."""
    if step <= start:
        return Estimate(0.0, 0.0, 1)
    return run.estimates("entropy/token").get(step, NOT_RECORDED)


def _predicted_since(run: Run, start: int, step: int) -> Estimate:
    """Return the sum of trapezoids of the steps from `start` until before `step`; nan where records lack a part."""
    if step <= start:
        return Estimate(0.0, 0.0, 1)
    sums, forward, backward = (
        run.estimates(f"delta_h/{name}") for name in ("cumulative_predicted", "forward", "backward")
    )
    later = range(start + 1, step + 1)
    if start not in sums or start not in forward or any(s not in sums or s not in backward for s in later):
        return NOT_RECORDED
    value = sums[step].value - sums[start].value
    ends = [0.25 * backward[s].stderr ** 2 for s in later]
    until = [sums[s].stderr ** 2 - end for s, end in zip(later, ends, strict=True)]  # of whole batches before s
    variances = [0.25 * forward[start].stderr ** 2, *(after - before for before, after in pairwise(until)), ends[-1]]
    total, squares = sum(variances), sum(variance**2 for variance in variances)
    if not squares > 0:
        return Estimate(value, 0.0 if total == 0 else math.nan, 1, sums[step].reason)
    folds = run.estimates("entropy/token")[step].num_samples
    return Estimate(value, math.sqrt(total), 1 + int((folds - 1) * total**2 / squares + 1e-9))
