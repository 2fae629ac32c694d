"""What prevents predictions in a run."""

from __future__ import annotations

from rl_training.records.failure import read_failure
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.report.series import Run, finite

FORWARD = "delta_h/forward"
NO_BAR = "no error bar: "  # prefix of a reason, which the sentence says itself


def early_end(run: Run) -> str:
    """Return why measuring ended early, or "". A report says it first."""
    failure = str(escape_surrogates(read_failure(run.folder)))
    return f"{failure[:1].upper()}{failure[1:]}: see logs/probe_error.txt." if failure else ""


def hindrance(run: Run) -> str:
    """Return why no prediction has a value or an error bar; "" without such a problem."""
    rows = run.rows(FORWARD)
    if rows.empty or rows["stderr"].notna().any():
        return ""
    reason = str(rows["reason"].iloc[-1]).removeprefix(NO_BAR) or "too few prompts in a step"
    what = "No step has a prediction" if finite(rows).empty else "No prediction has an error bar"
    return f"{what}: {reason}."
