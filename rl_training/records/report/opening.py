"""The first lines of a report: what reward and entropy have done, what to change, and do the predictions hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl_training.records.failure import FAILURE_FILE, read_failure
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.pages.writing import non_empty_lines, on_one_line
from rl_training.records.report.advice import advise, is_a_symptom
from rl_training.records.report.predictions import hindrance, whether_they_hold
from rl_training.records.report.standing_out import standing_out
from rl_training.records.report.standing_out.line import JUMP, Line
from rl_training.records.report.verdict import Verdict, judge
from rl_training.records.report.wording import Advice
from rl_training.records.table.series import Run

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
        settings: The parts of it that can be pasted.
        further: A sentence on the predictions, and one on bounded steps.
        lines: What stands out.
    """

    kind: str
    since: int
    headline: str
    evidence: str
    advice: str
    settings: tuple[str, ...]
    further: list[str]
    lines: list[Line]


def opening(run: Run) -> Opening:
    """Return the first lines of the report of a run."""
    verdict = judge(run)
    lines = [replace(line, advice=SYMPTOM) if is_a_symptom(line, verdict) else line for line in standing_out(run)]
    further = non_empty_lines(hindrance(run) or whether_they_hold(run), _bound(run))
    leading = next((line for line in lines if _comes_first(line, run, verdict)), None)
    if leading is None:
        kind = verdict.kind.name
        since = verdict.since
        headline, evidence = verdict.headline, verdict.evidence
        change = advise(run, verdict, lines)
    else:
        kind = leading.name
        since = leading.since
        headline, evidence = (
            _until(run, leading) if leading.name == JUMP else (leading.headline, f": {leading.evidence}")
        )
        change = leading.advice.as_a_change()
    others = [line for line in lines if line is not leading]
    first = Opening(kind, since, headline, evidence, change.text, change.settings, further, others)
    ended = on_one_line(_early_end(run))
    return replace(first, headline=ended, evidence=f" {first.headline}{first.evidence}") if ended else first


def _comes_first(line: Line, run: Run, verdict: Verdict) -> bool:
    """Return whether a line says more than the verdict: it holds of the whole run, or rewards cannot be compared."""
    if line.name == JUMP:
        return not verdict.kind.is_fall
    return bool(line.headline) and line.since <= run.steps[0] and not is_a_symptom(line, verdict)


def _early_end(run: Run) -> str:
    """Return why measuring ended early, or "". A report says it first."""
    failure = str(escape_surrogates(read_failure(run.folder)))
    return f"{failure[:1].upper()}{failure[1:]}: see {LOGS_FOLDER}/{FAILURE_FILE}." if failure else ""


def _until(run: Run, jump: Line) -> tuple[str, str]:
    """Return headline and evidence of a run whose reward jumped without a step that did it: what was so before that."""
    before = judge(run.until(jump.since - 1))
    until_then = f"{before.headline[:1].lower()}{before.headline[1:]}{before.evidence}"
    headline = f"Reward cannot be compared across step {jump.since}"
    return headline, f": {jump.evidence} Up to step {jump.since - 1}: {until_then}"


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
