"""Rows on the change of entropy over the run: measured, predicted, and by the naive product."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rl_training.records.pages.writing import MISSING, format_estimate
from rl_training.records.report.summary.row import Row
from rl_training.records.table.cumulative import NO_LATER_BATCH, naive_sums, sum_starts, sums_began_elsewhere
from rl_training.records.table.estimates import finite, to_estimates
from rl_training.records.table.missing import NO_PROBE
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate


def entropy_changes(run: Run) -> Iterator[Row]:
    """Yield the measured change of entropy at the last step that has one, and the sums of predictions up to there."""
    sums = [run.rows(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")]
    first, last = _span(run)
    changes = [Estimate.missing(NO_LATER_BATCH)] * 3
    if first != last:
        absent = Estimate.missing(NO_PROBE)
        changes = [to_estimates(rows).get(last, absent) for rows in (*sums, naive_sums(run))]
    truth, predicted, naive = changes
    if all(math.isnan(estimate.value) for estimate in changes) and len({e.code or e.reason for e in changes}) == 1:
        yield Row("change of entropy", MISSING, truth.reason)
        return
    span = "nats per token" + (f", batch of step {last} minus that of step {first}" if first is not None else "")
    if sums_began_elsewhere(run):
        span += f", to step {last} from the first step of the run that this one continues"
    notes = {"measured ΔH": span, "predicted ΔH": "sum of trapezoids", "naive product": "sum of same-batch products"}
    for (label, note), change in zip(notes.items(), changes, strict=True):
        error = "± 95 %" if change.stderr > 0 else change.reason or "no error bar"
        yield Row(
            label, format_estimate(change, True), change.reason if math.isnan(change.value) else f"{note}; {error}"
        )
    if truth.value == 0 or abs(truth.value) <= truth.half_width():
        yield Row("predicted / measured", MISSING, "the measured change is not detectably different from 0")
    elif not math.isnan(truth.value):
        no_bar = "no error bar on the measured change" if math.isnan(truth.half_width()) else ""
        for name, change in (("predicted", predicted), ("naive", naive)):
            if not math.isnan(change.value):
                yield Row(f"{name} / measured", f"{change.value / truth.value:.2f}", no_bar)


def _span(run: Run) -> tuple[int | None, int]:
    """Return the first and last step of the measured change of entropy; None as first if it started in another run."""
    sums = run.rows("delta_h/cumulative_measured")
    last = max(finite(sums).index, default=max(sums.index, default=0))
    return max((step for step in sum_starts(run) if step <= last), default=None), last
