"""Whether a run has predictions, or why not, and whether they agree with what was measured."""

from __future__ import annotations

import math

from rl_training.records.pages.writing import format_estimate
from rl_training.records.table.estimates import finite, last_of
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference, is_significant

FORWARD = "delta_h/forward"
FEW = ("few_folds", "few_prompts")  # codes of reasons in statistics/jackknife.py, which imports torch
NO_BAR = "no error bar: "  # with which reasons may begin


def why_no_predictions(run: Run) -> str:
    """Return why no prediction has a value or an error bar; "" without such a problem."""
    rows = run.rows(FORWARD)
    if rows.empty or rows["stderr"].notna().any():
        return ""
    last = last_of(rows)
    assert last is not None
    what = "No step has a prediction" if finite(rows).empty else "No prediction has an error bar"
    reason = (last.fix or last.message) if last.code in FEW else last.reason.removeprefix(NO_BAR)
    return f"{what}: {reason or 'too few prompts in a step'}."


def sums_of_changes(run: Run) -> tuple[Estimate, Estimate] | None:
    """Return the sums of predicted and of measured changes at the last step that has both; None without such a step."""
    predictions = run.finite_rows("delta_h/cumulative_predicted")
    measurements = run.finite_rows("delta_h/cumulative_measured")
    last = measurements.index.intersection(predictions.index, sort=False)[-1:]
    predicted = last_of(predictions.loc[last])
    measured = last_of(measurements.loc[last])
    if predicted is None or measured is None or predicted.stderr == 0:  # exact only where the sums begin
        return None
    return predicted, measured


def predictions_fail(run: Run) -> bool:
    """Return whether these sums are further apart than their errors allow."""
    sums = sums_of_changes(run)
    return sums is not None and is_significant(difference(*sums))


def agreement_with_measurements(run: Run) -> str:
    """Say whether the sums of predicted and measured changes agree at the last step that has both; "" without one."""
    sums = sums_of_changes(run)
    if sums is None:
        return ""
    predicted, measured = sums
    error = difference(predicted, measured)
    figures = (
        f"they add up to {format_estimate(predicted, True)} nats, and {format_estimate(measured, True)} was measured"
    )
    if math.isnan(error.stderr):
        return "Whether the predictions can be trusted is unknown: predictions or measurements have no error bar."
    if predictions_fail(run):
        return f"The predictions do not hold here: {figures}, which is further apart than their errors allow."
    half_width = error.bounds()[1] - error.value
    if 2 * half_width > abs(measured.value):  # the interval is wider than the change itself
        return f"Whether the predictions hold cannot be told yet, the intervals are too wide: {figures}."
    return f"The predictions hold so far: {figures}."
