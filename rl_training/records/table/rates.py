"""Entropy's present rate: its change per step now, from the narrowest of the sources that know it.

Thresholds were chosen by hand.
"""

from __future__ import annotations

import math

from rl_training.records.table.estimates import by_about_step, mean_of_rows
from rl_training.records.table.measured import per_step
from rl_training.records.table.series import Run, once_per_run
from rl_training.records.table.trends import MIN_STEPS, line_through
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

MIN_RECENT_STEPS = 10  # least number of logged steps that count as now; otherwise the last half of them
MAX_HALF_DIFFERENCE = 0.3  # of forward: if half of forward − backward is larger, forward is not used


@once_per_run
def entropy_now(run: Run) -> tuple[Estimate, int, str]:
    """Return entropy's present change per step, the first step that it covers, and its source.

    Of the line through the levels, the mean measured change and the mean predicted change it is the one with the
    narrowest interval; the value never decides. All of them are of the same steps, however few of these a probe
    measures. Predictions are left out if forward and backward differ too much, because steps are then too large for
    them.
    """
    levels = run.token_entropy()
    since = _first_recent_step(run)
    recent = levels[levels.index >= since]
    line = line_through(recent)
    candidates = [(line, int(recent.index[0]), "line through the logged steps")] if math.isfinite(line.stderr) else []
    means = {"mean of what each step was measured to change": per_step(run, "measured/delta_h")}
    if not predictions_disagree(run):
        means["mean of the predictions"] = run.finite_rows("delta_h/forward")
    for what, rows in means.items():
        rows = rows[rows.index >= since]
        mean = mean_of_rows(rows)
        if mean and math.isfinite(mean.stderr):
            candidates.append((mean, int(rows.index[0]), what))
    if not candidates:
        reason = f"of the steps since {since}, fewer than {MIN_STEPS} have an entropy, and no probe has measured one"
        return Estimate.missing(reason), 0, ""
    return min(candidates, key=lambda pair: pair[0].half_width())


def _first_recent_step(run: Run) -> int:
    """Return the first of the steps that count as now: of those with a log line or an entropy."""
    steps = sorted({*run.steps, *run.token_entropy().index})
    return int(steps[-max(len(steps) // 2, MIN_RECENT_STEPS) :][0])


def predictions_disagree(run: Run) -> bool:
    """Return whether forward and backward of the same steps differ significantly and by more than is allowed."""
    predictions = forward_and_backward(run)
    if predictions is None:
        return False
    forward, half = predictions
    return is_significant(half) and abs(half.value) > MAX_HALF_DIFFERENCE * abs(forward.value)


def forward_and_backward(run: Run) -> tuple[Estimate, Estimate] | None:
    """Return the mean of forward, and half of its mean difference from backward, over the last steps that have both."""
    forward = run.finite_rows("delta_h/forward")
    backward = by_about_step(run.finite_rows("delta_h/backward"))
    steps = forward.index.intersection(backward.index)[-MIN_RECENT_STEPS:]
    if steps.empty:
        return None
    ahead = mean_of_rows(forward.loc[steps])
    behind = mean_of_rows(backward.loc[steps])
    assert ahead is not None
    assert behind is not None
    stderr = 0.5 * math.hypot(ahead.stderr, behind.stderr)
    half = Estimate(0.5 * (ahead.value - behind.value), stderr, min(ahead.num_samples, behind.num_samples))
    return ahead, half


def is_falling(run: Run) -> bool:
    """Return whether entropy now falls significantly. If its rate is unknown, the interventions' plain step decides."""
    now = entropy_now(run)[0]
    fall = now if math.isfinite(now.value) else run.last("intervention/plain_mean_delta_h")
    return fall is not None and fall.bounds()[1] < 0
