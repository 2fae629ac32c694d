"""Changes of entropy of two runs that branched off from one, since then.

Two runs that share all steps up to a branching point share the errors of these steps, which cancel. Their changes of
entropy are therefore compared from `first` on, the step after the branching point, where both have the same weights:

measured    H(step) of one run − H(step) of the other, because entropy at `first` is the same
predicted   the difference of the sums Σ ½(F_j + B_{j+1}) over first ≤ j < step. Each sum equals
            ½F_first + Σ_{first<j<step} ½(F_j + B_j) + ½B_step, whose terms have independent errors
            (probes/trapezoid.py). Its variance Σ v has the degrees of freedom of (Σ v)²/Σ v² batches (Satterthwaite)

The two runs' errors since then are treated as independent. The runs share the batch at `first`, and random numbers
later; if anything, this makes the interval too wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rl_training.records.compare.lineage import common_steps
from rl_training.records.compare.members import Member
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference, mean_of, samples_of_sum

MEASURED = "measured ΔH"
PREDICTED = "predicted ΔH"
NOT_RECORDED = Estimate.missing("it is not recorded")


def since_branching(first: Sequence[Member], second: Sequence[Member], step: int) -> dict[str, Estimate]:
    """Return second − first of the changes of entropy since their branching points; {} if they share no steps.

    Several runs must form pairs, one from each group. The result is the mean over pairs, with the error between pairs.
    """
    pairs = [(member.run, other.run, common_steps(member, other) + 1) for member in first for other in second]
    branch_pairs = [(member, other, start) for member, other, start in pairs if start > 1]
    if not len(branch_pairs) == len(first) == len(second):
        return {}
    changes = {}
    for label, change in ((MEASURED, _measured_since), (PREDICTED, _predicted_since)):
        pair_differences = [
            difference(change(other, start, step), change(member, start, step)) for member, other, start in branch_pairs
        ]
        if all(math.isfinite(e.value) for e in pair_differences):
            changes[label] = (
                pair_differences[0] if len(pair_differences) == 1 else mean_of([e.value for e in pair_differences])
            )
    return changes


def _measured_since(run: Run, start: int, step: int) -> Estimate:
    """Return H(step), or 0 ± 0 up to `start`, where both runs have the same weights."""
    if step <= start:
        return Estimate(0.0, 0.0, 1)
    return run.estimates("entropy/token").get(step, NOT_RECORDED)


def _predicted_since(run: Run, start: int, step: int) -> Estimate:
    """Return the sum of trapezoids from step `start` to before `step`; nan if a part was not recorded."""
    if step <= start:
        return Estimate(0.0, 0.0, 1)
    sums = run.estimates("delta_h/cumulative_predicted")
    forward = run.estimates("delta_h/forward")
    backward = run.estimates("delta_h/backward")
    later = range(start + 1, step + 1)
    if start not in sums or start not in forward or any(s not in sums or s not in backward for s in later):
        return NOT_RECORDED
    value = sums[step].value - sums[start].value
    ends = [0.25 * backward[s].stderr ** 2 for s in later]
    until = [sums[s].stderr ** 2 - end for s, end in zip(later, ends, strict=True)]  # variance of the batches before s
    variances = [0.25 * forward[start].stderr ** 2, *(after - before for before, after in pairwise(until)), ends[-1]]
    total = sum(variances)
    if not total > 0:
        return Estimate(value, 0.0 if total == 0 else math.nan, 1, sums[step].reason)
    folds = run.estimates("entropy/token")[step].num_samples
    return Estimate(value, math.sqrt(total), samples_of_sum(variances, [folds] * len(variances)))
