"""Cumulative sums of changes of entropy: where they start, and the naive product's sum beside them."""

from __future__ import annotations

import math
from itertools import pairwise

import pandas as pd

from rl_training.records.table.estimates import to_rows
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate

BEGAN_ELSEWHERE = "the other sums began in the run that this one continues, whose steps are not recorded here"
NO_LATER_BATCH = "one measured step: there is no later batch to compare it with"


def naive_sums(run: Run) -> pd.DataFrame:
    """Return the sum of the naive product at each measured step s, for comparison with the cumulative estimates.

        naive(s) = Σ_{j<s} reuse(j),    naive(first) = 0.

    The change from the first batch to batch s is due to the updates before s. It is 0 wherever the cumulative sums
    start, and nan if they started in another run, or after a step that was not measured. It has no error bar: its error
    is a bias.
    """
    reuse = run.estimates("delta_h/reuse")
    if sums_began_elsewhere(run):
        return to_rows(dict.fromkeys(reuse, Estimate.missing(BEGAN_ELSEWHERE)))
    starts = sum_starts(run) or list(reuse)[:1]
    no_bar = "no error bar: its error is a bias"
    sums = {s: Estimate(0.0, reason=no_bar) if math.isfinite(e.value) else e for s, e in reuse.items() if s in starts}
    for before, step in pairwise(reuse):
        if step in sums or before not in sums:
            continue
        if math.isnan(sums[before].value):
            sums[step] = sums[before]
        elif before != step - 1:
            sums[step] = Estimate.missing(f"step {step - 1} was not measured, so the sum is incomplete")
        elif math.isnan(reuse[before].value):
            sums[step] = Estimate.missing(reuse[before].reason)
        else:
            sums[step] = Estimate(sums[before].value + reuse[before].value, reason=no_bar)
    return to_rows(dict(sorted(sums.items())))


def sum_starts(run: Run) -> list[int]:
    """Return the steps at which the cumulative sums are exactly 0: the first batch, and where a probe started over."""
    sums = run.rows("delta_h/cumulative_measured")
    return sums.index[(sums["value"] == 0) & (sums["stderr"] == 0)].to_list()


def sums_began_elsewhere(run: Run) -> bool:
    """Return whether the cumulative sums started in another run, which this one branched off from."""
    return not sum_starts(run) and not run.finite_rows("delta_h/cumulative_measured").empty
