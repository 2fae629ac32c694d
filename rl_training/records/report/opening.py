"""The first lines of a report: what reward and entropy have done, what to change, and do the predictions hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rl_training.records.report.advice import NOTHING, advice, as_a_change, is_a_symptom
from rl_training.records.report.hindrance import early_end, hindrance, predictions_fail, sums_of_changes
from rl_training.records.report.series import Run
from rl_training.records.report.standing_out import standing_out
from rl_training.records.report.standing_out.line import Advice, Line
from rl_training.records.report.verdict import FALLEN, HELD_OUT, PART, judge
from rl_training.records.report.writing import format_estimate, non_empty_lines, on_one_line
from rl_training.statistics.welch import difference

JUMP, FALLS = "jump", (FALLEN, HELD_OUT, PART)  # a line; verdicts that a jump of reward explains, or does not touch
SYMPTOM = Advice.to_do("This follows from what the first line says.")


@dataclass(frozen=True)
class Opening:
    """The first lines of a report.

    Args:
        kind: The kind of the verdict; or, if a line that stands out says all there is, its name.
        since: Step since which that holds.
        headline: What reward and entropy have done; or, if measuring ended early, that.
        evidence: The rest of that sentence.
        advice: The one thing to change.
        further: A sentence on the predictions, and one on bounded steps.
        lines: What stands out.
    """

    kind: str
    since: int
    headline: str
    evidence: str
    advice: str
    further: list[str]
    lines: list[Line]


def opening(run: Run) -> Opening:
    """Return the first lines of the report of a run."""
    verdict = judge(run)
    lines = [replace(line, advice=SYMPTOM) if is_a_symptom(line, verdict) else line for line in standing_out(run)]
    further = non_empty_lines(hindrance(run) or _whether_predictions_hold(run), _bound(run))
    whole = next(
        (line for line in lines if line.headline and line.since <= run.steps[0] and line.advice != SYMPTOM), None
    )
    jump = next((line for line in lines if line.name == JUMP and verdict.kind not in FALLS), None)
    if whole is not None:  # since the first step: nothing else is to be said of this run
        lines = [line for line in lines if line is not whole]
        first = Opening(
            whole.name, whole.since, whole.headline, f": {whole.evidence}", as_a_change(whole), further, lines
        )
    elif jump is not None:
        first = _until(run, jump, further, [line for line in lines if line is not jump])
    else:
        change = advice(run, verdict, lines)
        if hindrance(run) and change.startswith(NOTHING):
            change = change.replace(NOTHING, "About entropy there is nothing to do", 1)
        first = Opening(verdict.kind, verdict.since, verdict.headline, verdict.evidence, change, further, lines)
    ended = on_one_line(early_end(run))
    return replace(first, headline=ended, evidence=f" {first.headline}{first.evidence}") if ended else first


def _until(run: Run, jump: Line, further: list[str], lines: list[Line]) -> Opening:
    """Return the first lines of a run whose reward jumped without a step that did it: its verdict is of before that."""
    before = judge(run.until(jump.since - 1))
    told = f"{before.headline[:1].lower()}{before.headline[1:]}{before.evidence}"
    headline = f"Reward cannot be compared across step {jump.since}"
    evidence = f": {jump.evidence} Up to step {jump.since - 1}: {told}"
    return Opening(jump.name, jump.since, headline, evidence, as_a_change(jump), further, lines)


def _whether_predictions_hold(run: Run) -> str:
    """Compare the sums of predicted and measured changes at the last step that has both."""
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
    if 2.0 * error.bounds()[1] - 2.0 * error.value > abs(measured.value):  # twice the half-width
        return f"Whether the predictions hold cannot be told yet, the intervals are too wide: {figures}."
    return f"The predictions hold so far: {figures}."


def _bound(run: Run) -> str:
    """Describe how the KL bound has shortened steps, if there was one."""
    kl, tries, rates = (run.finite_rows(f"bound/{name}")["value"] for name in ("kl", "tries", "learning_rate"))
    if kl.empty:
        return ""
    shortened = int((tries > 0).sum())
    return (
        f"KL bounds the steps: {kl.median():.2g} nats per token in the median. {shortened} of {len(kl)} steps were "
        f"shortened, and the learning rate went from {rates.iloc[0]:.2g} to {rates.iloc[-1]:.2g}."
    )
