"""Final figures of groups of runs with their errors, and the differences between groups with theirs.

A group's error. With n ≥ 2 seeds: between seeds, se = sd/√n with n − 1 degrees of freedom. It includes everything
that differs from seed to seed. With one seed: within the run (the steps that are averaged, the folds of a probe, the
prompts of an evaluation), which excludes variation between seeds; the page says so.

Step. A group is evaluated at the furthest step that two of its runs have reached (a single run: its last);
seeds that ended earlier are left out of its figures. Two groups are compared at the earlier of their steps.

Several seeds' noise scale is 1 / the mean of 1/B, the signal-to-noise ratio, with the ends of that mean's interval
turned over; one seed's has Fieller's interval, as its run's own report.

A difference has se² = se₁² + se₂², and Student's t with Welch's degrees of freedom. That the same seeds in two groups
share data and initial weights is not used: it makes the interval too wide, if anything. That runs are one run up to a
branching point is used for changes of entropy: branches.py. Means over logged steps are over the same steps in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.noise_scale import noise_scale_interval
from rl_training.mathematics.welch import difference, mean_of
from rl_training.records.compare.branches import since_branching
from rl_training.records.compare.groups import Group, Member
from rl_training.records.frames import IN_TRAINING, estimate_of
from rl_training.records.report.series import Measurements
from rl_training.records.report.summary import MAX_WINDOW

PROBED = {
    "measured ΔH": "delta_h/cumulative_measured",
    "predicted ΔH": "delta_h/cumulative_predicted",
}
NOISE_SCALE = "noise scale (prompts)"
# Of the trainer's own evaluations: what it logs beside these is of its clipping and its clock.
OF_TRAINING = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "completions/mean_length")
MANY_GROUPS = 4  # with so many, each is held against the first only


@dataclass(frozen=True)
class Difference:
    """The second group minus the first, at `step`."""

    first: Group
    second: Group
    step: int
    figures: dict[str, Estimate]

    @property
    def single_seed(self) -> bool:
        """Whether one of them has one seed there, so that the spread between seeds is not in the error."""
        return any(len(members_at(group, self.step)) < 2 for group in (self.first, self.second))


def last_common_step(group: Group) -> int:
    """Returns the furthest step that two of the group's runs have reached; of a single run, its last."""
    return sorted((member.last_step for member in group.members), reverse=True)[:2][-1]


def members_at(group: Group, step: int) -> list[Member]:
    """Returns the runs of the group that have reached this step."""
    return [member for member in group.members if member.last_step >= step]


def final_figures(group: Group, step: int, since: int = 0) -> dict[str, Estimate]:
    """Returns the group's figures at `step` by their labels: those that all of its runs there have.

    since  where all runs that these are compared with have begun: no mean is over an earlier step
    """
    of_runs = [figures_of(member, step, since) for member in members_at(group, step)]
    labels = [label for label in of_runs[0] if all(label in figures for figures in of_runs)]
    return {label: _over_seeds(label, [figures[label] for figures in of_runs]) for label in labels}


def begun(groups: Sequence[Group], step: int) -> int:
    """Returns the step from which on all runs of these groups that have reached `step` are recorded."""
    return max(int(member.run.metrics[0]["step"]) for group in groups for member in members_at(group, step))


def figures_of(member: Member, step: int, since: int = 0) -> dict[str, Estimate]:
    """Returns one run's figures at `step`: means over the last logged steps, sums of a probe, the last evaluation."""
    entropy = {s: e.value for s, e in member.run.measured("entropy/token").items() if math.isfinite(e.value)}
    figures = {
        "reward": _mean_until(member.run.logged("reward"), step, since),
        "token entropy": _mean_until(entropy or member.run.logged("entropy"), step, since),
    }
    for label, name in PROBED.items():
        known = {s: e for s, e in member.run.measured(name).items() if s <= step and math.isfinite(e.value)}
        if known:
            figures[label] = known[max(known)]
    scales = {s: e for s, e in noise_scales(member).items() if s <= step}
    if scales:
        figures[NOISE_SCALE] = scales[max(scales)]
    table = member.evaluations
    told = (table["evaluation"] != IN_TRAINING) | table["metric"].isin(OF_TRAINING)
    for (evaluation, metric), rows in table[told & (table["step"] <= step)].groupby(["evaluation", "metric"]):
        row = rows.loc[rows["step"].idxmax()]
        if math.isfinite(row["value"]):
            figures[f"{metric} · {evaluation}"] = estimate_of(row)
    return {label: estimate for label, estimate in figures.items() if math.isfinite(estimate.value)}


def compare_groups(groups: Sequence[Group]) -> list[Difference]:
    """Returns the differences of all pairs of groups; of MANY_GROUPS or more, of each from the first."""
    pairs = combinations(groups, 2) if len(groups) < MANY_GROUPS else ((groups[0], other) for other in groups[1:])
    differences = []
    for first, second in pairs:
        step = min(last_common_step(first), last_common_step(second))
        since = begun((first, second), step)
        before, after = final_figures(first, step, since), final_figures(second, step, since)
        common = {label: difference(after[label], before[label]) for label in before if label in after}
        common |= since_branching(members_at(first, step), members_at(second, step), step)
        differences.append(Difference(first, second, step, common))
    return differences


def _mean_until(values: dict[int, float], step: int, since: int) -> Estimate:
    """Returns the mean over the last few logged steps up to `step`; its error is their scatter: a trend widens it."""
    known = [value for s, value in values.items() if since <= s <= step]
    last = known[-min(MAX_WINDOW, max(len(known) // 2, 1)) :]
    return mean_of(last)


def _over_seeds(label: str, estimates: Sequence[Estimate]) -> Estimate:
    if len(estimates) == 1:
        return estimates[0]
    return (mean_noise_scale if label == NOISE_SCALE else mean_over_runs)(estimates)


def mean_over_runs(estimates: Sequence[Estimate]) -> Estimate:
    """Returns the mean of several runs with the error between them; of shares that are all 0 or 1, one's interval."""
    if len({estimate.value for estimate in estimates}) == 1 and all(estimate.interval for estimate in estimates):
        return estimates[0]
    return mean_of([estimate.value for estimate in estimates])


def noise_scales(member: Member) -> Measurements:
    """Returns one run's noise scale by step, in prompts, with Fieller's interval; where |G|² was not lost in noise."""
    measured = member.run.with_interval("gns/noise_scale_prompts")
    return {step: estimate for step, estimate in measured.items() if 0 < estimate.value < math.inf}


def mean_noise_scale(scales: Sequence[Estimate]) -> Estimate:
    """Returns 1 / the mean of 1/B over runs, with the interval of that mean turned over: to ∞ where it holds 0.

    Example: of 100 and 300 it is 150.
    """
    ratio = mean_of([1 / scale.value for scale in scales])
    ends = None if math.isnan(ratio.stderr) else noise_scale_interval(ratio.ends())
    return Estimate(1 / ratio.value, num_samples=ratio.num_samples, reason=ratio.reason, interval=ends)
