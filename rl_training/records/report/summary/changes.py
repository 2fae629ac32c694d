"""Rows on the change of entropy over the run: measured, predicted, and by the naive product."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rl_training.records.pages.writing import MISSING, format_estimate
from rl_training.records.report.summary.row import Row
from rl_training.records.table.cumulative import NO_LATER_BATCH, naive_sums, sum_starts, sums_began_elsewhere
from rl_training.records.table.estimates import finite, to_estimates
from rl_training.records.table.missing import NO_PROBE
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate

MEASURED_SUM = "delta_h/cumulative_measured"
PREDICTED_SUM = "delta_h/cumulative_predicted"


@dataclass(frozen=True)
class Changes:
    """The change of entropy up to the last step whose measured one is known.

    Args:
        first: Its first step; None if it started in another run.
        last: Its last step.
        measured, predicted, naive: The change by each of the three sums, in nats per token.
    """

    first: int | None
    last: int
    measured: Estimate
    predicted: Estimate
    naive: Estimate

    @classmethod
    def of(cls, run: Run) -> Changes:
        sums = run.rows(MEASURED_SUM)
        last = max(finite(sums).index, default=max(sums.index, default=0))
        first = max((step for step in sum_starts(run) if step <= last), default=None)
        if first == last:
            alone = Estimate.missing(NO_LATER_BATCH)
            return cls(first, last, alone, alone, alone)
        absent = Estimate.missing(NO_PROBE)
        measured, predicted, naive = (
            to_estimates(rows).get(last, absent) for rows in (sums, run.rows(PREDICTED_SUM), naive_sums(run))
        )
        return cls(first, last, measured, predicted, naive)

    @property
    def common_reason(self) -> str:
        """Why none of the three is known, if that is one reason; otherwise ""."""
        changes = (self.measured, self.predicted, self.naive)
        is_one = len({change.code or change.reason for change in changes}) == 1
        return self.measured.reason if is_one and all(math.isnan(change.value) for change in changes) else ""


def entropy_changes(run: Run) -> Iterator[Row]:
    """Yield the measured change of entropy at the last step that has one, and the sums of predictions up to there."""
    changes = Changes.of(run)
    if changes.common_reason:
        yield Row("change of entropy", MISSING, changes.common_reason)
        return
    span = "nats per token"
    if changes.first is not None:
        span += f", batch of step {changes.last} minus that of step {changes.first}"
    if sums_began_elsewhere(run):
        span += f", to step {changes.last} from the first step of the run that this one continues"
    yield _change_row("measured ΔH", changes.measured, span)
    yield _change_row("predicted ΔH", changes.predicted, "sum of trapezoids")
    yield _change_row("naive product", changes.naive, "sum of same-batch products")
    yield from _ratios(changes)


def _change_row(label: str, change: Estimate, note: str) -> Row:
    if math.isnan(change.value):
        return Row(label, MISSING, change.reason)
    error = "± 95 %" if change.stderr > 0 else change.reason or "no error bar"
    return Row(label, format_estimate(change, signed=True), f"{note}; {error}")


def _ratios(changes: Changes) -> Iterator[Row]:
    """Yield both sums as shares of the measured change, where that is not 0 within its error."""
    measured = changes.measured
    if math.isnan(measured.value):
        return
    if measured.value == 0 or abs(measured.value) <= measured.half_width():
        yield Row("predicted / measured", MISSING, "the measured change is not detectably different from 0")
        return
    note = "no error bar on the measured change" if math.isnan(measured.half_width()) else ""
    for name, change in (("predicted", changes.predicted), ("naive", changes.naive)):
        if not math.isnan(change.value):
            yield Row(f"{name} / measured", f"{change.value / measured.value:.2f}", note)
