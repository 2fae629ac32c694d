"""What the report opens with: is entropy collapsing, how fast, and can the predictions be trusted here."""

from __future__ import annotations

import math
import statistics

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import difference, is_significant
from rl_training.records.report.forecast import in_twenty_steps
from rl_training.records.report.series import Run
from rl_training.records.report.summary import MAX_WINDOW, in_words

LAST_STEPS = 10  # over which the present rate is taken


def opening(run: Run) -> list[str]:
    """Returns up to four sentences, in plain words; those that the records say nothing about are left out."""
    return [sentence for sentence in (_level(run), in_twenty_steps(run), _rate(run), _trust(run)) if sentence]


def _level(run: Run) -> str:
    values = list(run.token_entropy().values())
    window = min(MAX_WINDOW, len(values) // 2)
    if not window:
        return ""
    first, last = statistics.fmean(values[:window]), statistics.fmean(values[-window:])
    change = f", by {abs(last / first - 1):.0%}" if first > 0 else ""
    return f"Token entropy has {'fallen' if last < first else 'risen'} from {first:.3f} to {last:.3f} nats{change}."


def _rate(run: Run) -> str:
    """Returns how fast entropy changes now: the mean of the last forward predictions."""
    forward = [e for e in run.measured("delta_h/forward").values() if math.isfinite(e.value + e.stderr)][-LAST_STEPS:]
    if not forward:
        return ""
    stderr = math.sqrt(sum(e.stderr**2 for e in forward)) / len(forward)
    rate = Estimate(statistics.fmean(e.value for e in forward), stderr, min(e.num_samples for e in forward))
    over = f"over the last {len(forward)} steps" if len(forward) > 1 else "by the last step"
    told = f"{in_words(rate, signed=True)} nats a step {over}"
    if not is_significant(rate):
        return f"It is not predicted to move by more than noise now ({told})."
    if rate.value > 0:
        return f"It is predicted to rise now: {told}."
    return f"It is falling now: {told}."


def _trust(run: Run) -> str:
    measured, predicted = (run.measured(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted"))
    steps = [s for s in measured if s in predicted and math.isfinite(measured[s].value + predicted[s].value)]
    if not steps or predicted[steps[-1]].stderr == 0:
        return ""
    truth, sum_of_predictions = measured[steps[-1]], predicted[steps[-1]]
    apart = difference(sum_of_predictions, truth)
    if math.isnan(apart.stderr):
        return "Whether the predictions can be trusted is unknown: predictions or measurements have no error bar."
    told = in_words(sum_of_predictions, signed=True)
    figures = f"they add up to {told} nats, and {in_words(truth, signed=True)} was measured"
    if is_significant(apart):
        return f"Do not trust the predictions here: {figures}, which is further apart than their errors allow."
    return f"The predictions hold so far: {figures}."
