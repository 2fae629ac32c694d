"""Changes of entropy of two runs that are one run up to a branching point, compared from there on.

Both sums hold the same steps up to it, with the same errors, which cancel in their difference. Left is what the records
say of the steps since: `first`, the one after the branching point, whose weights are the same in both, and later ones.

measured    H(step) of one run − H(step) of the other: entropy at `first` is the same
predicted   Σ ½(F_j + B_{j+1}) over first ≤ j < step of each: ½F_first + Σ_{first<j<step} ½(F_j + B_j) + ½B_step, whose
            terms have independent errors (mathematics/trapezoid.py). Σ v of their variances has the degrees of freedom
            of (Σ v)²/Σ v² batches (Satterthwaite)

The two runs' errors since then count as independent. That the batch at `first` is the same in both, and that later ones
share random numbers, makes the interval too wide, if anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import difference, mean_of
from rl_training.records.compare.groups import Member, common_steps
from rl_training.records.report.series import Run


def since_branching(first: Sequence[Member], second: Sequence[Member], step: int) -> dict[str, Estimate]:
    """Returns second − first of the changes of entropy since their branching points; nothing where they share no steps.

    Several runs are pairs, each of them in one: the mean over pairs, with the error between pairs.
    """
    pairs = [(one, other, common_steps(one, other)) for one in first for other in second]
    branched = [(one.run, other.run, common + 1) for one, other, common in pairs if common]
    if not len(branched) == len(first) == len(second):
        return {}
    found: dict[str, list[Estimate]] = {"measured ΔH": [], "predicted ΔH": []}
    for one, other, start in branched:
        found["measured ΔH"].append(_difference(*(_level(run, start, step) for run in (other, one))))
        found["predicted ΔH"].append(_difference(*(predicted_since(run, start, step) for run in (other, one))))
    known = {label: some for label, some in found.items() if all(math.isfinite(e.value) for e in some)}
    return {label: some[0] if len(some) == 1 else mean_of([e.value for e in some]) for label, some in known.items()}


def _difference(one: Estimate, other: Estimate) -> Estimate:
    return difference(one, other) if math.isfinite(one.value - other.value) else Estimate.missing("it is not recorded")


def _level(run: Run, start: int, step: int) -> Estimate:
    """Returns H(step); the 0 ± 0 by which it has changed at `start`, where the weights of both runs are the same."""
    if step <= start:
        return Estimate(0.0, 0.0, 1)
    return run.measured("entropy/token").get(step) or Estimate.missing("it is not recorded")


def predicted_since(run: Run, start: int, step: int) -> Estimate:
    """Returns the sum of trapezoids of the steps from `start` until before `step`; nan where records lack a part."""
    if step <= start:
        return Estimate(0.0, 0.0, 1)
    names = ("cumulative_predicted", "forward", "backward")
    sums, forward, backward = (run.measured(f"delta_h/{name}") for name in names)
    later = range(start + 1, step + 1)
    if start not in sums or start not in forward or any(s not in sums or s not in backward for s in later):
        return Estimate.missing("it is not recorded")
    value = sums[step].value - sums[start].value
    ends = [0.25 * backward[s].stderr ** 2 for s in later]
    until = [sums[s].stderr ** 2 - end for s, end in zip(later, ends, strict=True)]  # of whole batches before s
    variances = [0.25 * forward[start].stderr ** 2, *(after - before for before, after in pairwise(until)), ends[-1]]
    total, squares = sum(variances), sum(variance**2 for variance in variances)
    if not squares > 0:
        return Estimate(value, 0.0 if total == 0 else math.nan, 1, sums[step].reason)
    folds = run.measured("entropy/token")[step].num_samples
    return Estimate(value, math.sqrt(total), 1 + int((folds - 1) * total**2 / squares + 1e-9))
