"""What prevents predictions in a run, and whether they agree with what was measured."""

from __future__ import annotations

from rl_training.records.failure import read_failure
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.report.estimates import finite, last_of
from rl_training.records.report.series import Run
from rl_training.statistics.estimate import FEW_FOLDS, FEW_PROMPTS, Estimate
from rl_training.statistics.welch import difference, is_significant

FORWARD = "delta_h/forward"
# Codes of reasons that begin with what the sentence says itself: "no error bar: …"
FEW = (FEW_FOLDS.code, FEW_PROMPTS.code)


def early_end(run: Run) -> str:
    """Return why measuring ended early, or "". A report says it first."""
    failure = str(escape_surrogates(read_failure(run.folder)))
    return f"{failure[:1].upper()}{failure[1:]}: see logs/probe_error.txt." if failure else ""


def hindrance(run: Run) -> str:
    """Return why no prediction has a value or an error bar; "" without such a problem."""
    rows = run.rows(FORWARD)
    if rows.empty or rows["stderr"].notna().any():
        return ""
    reason, code = rows[["reason", "code"]].iloc[-1]
    reason = str(reason) or "too few prompts in a step"
    # What the sentence says itself, which other reasons have as a prefix.
    reason = (reason.partition(": ")[2] or reason) if code in FEW else reason.removeprefix("no error bar: ")
    what = "No step has a prediction" if finite(rows).empty else "No prediction has an error bar"
    return f"{what}: {reason}."


def sums_of_changes(run: Run) -> tuple[Estimate, Estimate] | None:
    """Return the sums of predicted and of measured changes at the last step that has both; None without such a step."""
    predicted, measured = (run.finite_rows(f"delta_h/cumulative_{kind}") for kind in ("predicted", "measured"))
    last = measured.index.intersection(predicted.index, sort=False)[-1:]
    sums = last_of(predicted.loc[last]), last_of(measured.loc[last])
    return None if sums[0] is None or sums[1] is None or sums[0].stderr == 0 else (sums[0], sums[1])


def predictions_fail(run: Run) -> bool:
    """Return whether these sums are further apart than their errors allow."""
    sums = sums_of_changes(run)
    return sums is not None and is_significant(difference(*sums))
