"""The first lines of a report: what reward and entropy have done, what to change, and do the predictions hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl_training.records.failure import FAILURE_FILE, read_failure
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.pages.writing import capitalized, non_empty_lines, on_one_line, uncapitalized
from rl_training.records.report.advice import advise, is_a_symptom
from rl_training.records.report.predictions import agreement_with_measurements, why_no_predictions
from rl_training.records.report.proposals import Advice
from rl_training.records.report.standing_out import shown, standing_out
from rl_training.records.report.standing_out.finding import JUMP, Finding
from rl_training.records.report.verdict import Verdict, judge
from rl_training.records.table.series import Run


@dataclass(frozen=True)
class Opening:
    """The first lines of a report.

    Args:
        kind: The kind of the verdict; or, if a finding says all there is, its name.
        since: Step since which that holds.
        headline: What reward and entropy have done; or, if measuring ended early, that.
        joint: What stands between that and the rest of the sentence.
        evidence: The rest of the sentence.
        advice: The one thing to change.
        further: A sentence on the predictions, and one on bounded steps.
        findings: What stands out, as far as it is shown.
    """

    kind: str
    since: int
    headline: str
    joint: str
    evidence: str
    advice: Advice
    further: list[str]
    findings: list[Finding]

    @property
    def sentence(self) -> str:
        return f"{self.headline}{self.joint}{self.evidence}"


def opening(run: Run) -> Opening:
    """Return the first lines of the report of a run."""
    verdict = judge(run)
    findings = [replace(finding, follows_from_verdict=is_a_symptom(finding, verdict)) for finding in standing_out(run)]
    further = non_empty_lines(why_no_predictions(run) or agreement_with_measurements(run), _bounded_steps(run))
    leading = next((finding for finding in findings if _comes_first(finding, run, verdict)), None)
    if leading is None:
        advice = advise(run, verdict, findings)
        lines = shown(findings)
        parts = (verdict.headline, verdict.joint, verdict.evidence)
        first = Opening(verdict.kind.name, verdict.since, *parts, advice, further, lines)
    else:
        headline, evidence = _first_sentence(leading, run)
        lines = shown([finding for finding in findings if finding is not leading])
        advice = leading.proposal.sentence()
        first = Opening(leading.name, leading.since, headline, ": ", evidence, advice, further, lines)
    end = on_one_line(_early_end(run))
    return replace(first, headline=end, joint=" ", evidence=first.sentence) if end else first


def _comes_first(finding: Finding, run: Run, verdict: Verdict) -> bool:
    """Return whether it says more than the verdict: it holds of the whole run, or rewards cannot be compared."""
    if finding.name == JUMP:
        return not verdict.kind.is_fall
    return bool(finding.headline) and finding.since <= run.steps[0] and not finding.follows_from_verdict


def _first_sentence(finding: Finding, run: Run) -> tuple[str, str]:
    """Return headline and evidence of a run of which a finding says more than the verdict."""
    if finding.name != JUMP:
        return finding.headline, finding.evidence
    last = finding.since - 1
    before = judge(run.until(last))
    until_then = f"Up to step {last}: {uncapitalized(before.sentence)}"
    return f"Reward cannot be compared across step {finding.since}", f"{finding.evidence} {until_then}"


def _early_end(run: Run) -> str:
    """Return why measuring ended early, or "". A report says it first."""
    failure = str(escape_surrogates(read_failure(run.folder)))
    return f"{capitalized(failure)}: see {LOGS_FOLDER}/{FAILURE_FILE}." if failure else ""


def _bounded_steps(run: Run) -> str:
    """Describe how the KL bound has shortened steps; "" without one."""
    kl = run.values("bound/kl")
    if kl.empty:
        return ""
    rates = run.values("bound/learning_rate")
    shortened = int((run.values("bound/tries") > 0).sum())
    return (
        f"KL bounds the steps: {kl.median():.2g} nats per token in the median. {shortened} of {len(kl)} steps were "
        f"shortened, and the learning rate went from {rates.iloc[0]:.2g} to {rates.iloc[-1]:.2g}."
    )
