"""What a report says of a run in words: how it opens, the lines of its summary, and how an estimate is written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import difference, is_significant
from rl_training.records.report.predictions import AHEAD, alerts, in_twenty_steps
from rl_training.records.report.series import (
    MILLI,
    NO_LATER_BATCH,
    NO_PROBE,
    Run,
    finite,
    goes_on,
    held_out_rewards,
    naive_of,
    origins,
)

MISSING = "–"
MAX_WINDOW = 5  # logged steps averaged at either end of a run: one batch alone is too noisy to compare
LAST_STEPS = 10  # over which the present rate is taken


class Row(NamedTuple):
    """A line of the summary. `value` is MISSING when it is not available, and `note` then says why."""

    label: str
    value: str
    note: str = ""


def in_words(estimate: Estimate | None, signed: bool = False) -> str:
    """Returns value ± half width of the 95 % interval, with two digits of the latter; MISSING without a value.

    Of an interval that is not symmetric: value (low … high).
    """
    if estimate is None or math.isnan(estimate.value):
        return MISSING
    sign, ends = "+" if signed else "", estimate.ends()
    half = max((abs(end - estimate.value) for end in ends if math.isfinite(end)), default=math.nan)
    if estimate.interval and half > 0:
        value, low, high = (f"{number:{sign}.{_decimals(half)}f}" for number in (estimate.value, *ends))
        return f"{value} ({low} … {high})".replace("inf", "∞")
    return plus_minus(estimate.value, half, sign)


def plus_minus(value: float, half: float, sign: str = "") -> str:
    """Returns value ± half, with two digits of `half`; the value alone where that is 0 or not known.

    >>> plus_minus(1.8234, 0.2618, "+")
    '+1.82 ± 0.26'
    """
    if not half > 0:
        return f"{value:{sign}.3g}"
    decimals = _decimals(half)
    return f"{value:{sign}.{decimals}f} ± {half:.{decimals}f}"


def milli(change: Estimate) -> str:
    """Returns a change in thousandths, with its sign ± half of its 95 % interval; MISSING without a value."""
    if math.isnan(change.value):
        return MISSING
    return plus_minus(MILLI * change.value, MILLI * (change.ends()[1] - change.value), "+")


def with_stderr(estimate: Estimate | None) -> str:
    """Returns value ± one standard error; of a share on which all prompts agree its 95 % interval: 1 (0.839 … 1)."""
    if estimate is None or math.isnan(estimate.value):
        return MISSING
    if estimate.stderr > 0:
        return f"{estimate.value:.4g} ± {estimate.stderr:.2g}"
    interval = " ({:.3g} … {:.3g})".format(*estimate.interval) if estimate.interval else ""
    return f"{estimate.value:.4g}{interval}"


def _decimals(half: float) -> int:
    """Returns how many decimals say two digits of a half width: the rest of the value is noise."""
    return max(0, 1 - math.floor(math.log10(half)))


def opening(run: Run) -> list[str]:
    """Returns up to four sentences: is entropy collapsing, how fast, and can the predictions be trusted here."""
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
    forward = [e for e in run.known("delta_h/forward").values() if math.isfinite(e.stderr)][-LAST_STEPS:]
    if not forward:
        return ""
    stderr = math.sqrt(sum(e.stderr**2 for e in forward)) / len(forward)
    rate = Estimate(statistics.fmean(e.value for e in forward), stderr, min(e.num_samples for e in forward))
    over = f"over the last {len(forward)} steps" if len(forward) > 1 else "by the last step"
    told = f"{in_words(rate, signed=True)} nats a step {over}"
    if not is_significant(rate):
        return f"It is not predicted to move by more than noise now ({told})."
    return f"It is {'predicted to rise' if rate.value > 0 else 'falling'} now: {told}."


def _trust(run: Run) -> str:
    measured, predicted = (run.known(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted"))
    steps = [step for step in measured if step in predicted]
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


def summarize(run: Run) -> list[Row]:
    """Returns the lines of the summary: where reward and entropy went, and predicted against measured change."""
    steps = [int(line["step"]) for line in run.metrics]
    unit = "nats per token; " if run.measured("entropy/token") else "nats per token, as TRL logs it; "
    acceptance = run.logged("buffer/acceptance")
    drawn = "of all that was generated, prompts drawn by difficulty; " if acceptance else ""
    rows = [
        Row("steps", str(steps[-1]), "" if len(steps) == steps[-1] else f"{len(steps)} of them logged"),
        _first_to_last("reward", run.logged("reward"), drawn),
        *(_held_out_row(label, rewards) for label, rewards in held_out_rewards(run).items()),
    ]
    if acceptance:
        rows.append(_first_to_last("accepted prompts", acceptance, "share of the prompts generated; "))
    rows += [_first_to_last("token entropy", run.token_entropy(), unit), *_alert_rows(run), *_change_rows(run)]
    if run.measured("gns/noise_scale_prompts"):
        rows.append(_scale_row(run))
    if run.measured("ess/advantage"):
        rows.append(_sample_row(run))
    costs = list(run.logged("probe_cost/fraction_of_step").values())
    if not costs:
        return [*rows, Row("probe cost", MISSING, "no probe was timed")]
    note = f"of a step's time; median over the measured steps ({len(costs)})"
    return [*rows, Row("probe cost", f"{100 * statistics.median(costs):.1f} %", note)]


def _held_out_row(label: str, rewards: Mapping[int, Estimate]) -> Row:
    """Returns the row of the reward on prompts that training never sees, at the first and the last evaluated step."""
    ends = [*rewards][:1] + [*rewards][1:][-1:]
    value = " → ".join(in_words(rewards[step]) for step in ends)
    error = "; ± 95 % over prompts" if all(math.isfinite(rewards[step].stderr) for step in ends) else ""
    return Row("held-out reward", value, f"{label}, step{'s' * (len(ends) > 1)} {' and '.join(map(str, ends))}{error}")


def _first_to_last(label: str, values: Mapping[int, float], unit: str = "") -> Row:
    """Returns the row of a mean over the first few logged steps and one over the last few; its note says which."""
    steps = list(values)
    if not steps:
        return Row(label, MISSING, "no finite value was logged")
    if len(steps) == 1:
        return Row(label, f"{values[steps[0]]:.3f}", f"{unit}step {steps[0]} alone")
    window = min(MAX_WINDOW, len(steps) // 2)
    first, last = steps[:window], steps[-window:]
    value = " → ".join(f"{statistics.fmean(values[step] for step in end):.3f}" for end in (first, last))
    if window == 1:
        return Row(label, value, f"{unit}steps {first[0]} and {last[0]}")
    return Row(label, value, f"{unit}means over steps {first[0]}–{first[-1]} and {last[0]}–{last[-1]}")


def _alert_rows(run: Run) -> list[Row]:
    """Returns the row of the alerts, where they are enabled."""
    found = alerts(run)
    if found is None:
        return []
    steps, checked, right = found
    if not steps:
        return [Row("alerts", "none", f"entropy was never likely to be below its level in {AHEAD} steps")]
    note = f"forecast below its level within {AHEAD} steps; {right} of the {checked} that could be checked were right"
    return [Row("alerts", f"at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}", note)]


def _change_rows(run: Run) -> list[Row]:
    """Returns the rows that hold the predicted change of entropy against the measured one, at the same step."""
    measured, predicted = run.measured("delta_h/cumulative_measured"), run.measured("delta_h/cumulative_predicted")
    last = max(finite(measured) or measured, default=0)
    first = max((step for step in origins(run) if step <= last), default=None)
    span = "nats per token" if first is None else f"nats per token, from step {first} to step {last}"
    if goes_on(run):
        span += f", to step {last} from the first step of the run that this one continues"
    if first == last:
        truth = trapezoid = product = Estimate.missing(NO_LATER_BATCH)
    else:
        absent = Estimate.missing(NO_PROBE)
        truth, trapezoid, product = (sums.get(last, absent) for sums in (measured, predicted, naive_of(run)))
    changes = {
        "measured ΔH": (truth, span),
        "predicted ΔH": (trapezoid, "sum of trapezoids"),
        "naive product": (product, "sum of same-batch products"),
    }
    if all(math.isnan(e.value) for e, _ in changes.values()) and truth.reason == trapezoid.reason == product.reason:
        return [Row("change of entropy", MISSING, truth.reason)]  # three lines would say the same
    rows = []
    for label, (estimate, note) in changes.items():
        remark = "± 95 %" if estimate.stderr > 0 else estimate.reason or "no error bar"
        note = estimate.reason if math.isnan(estimate.value) else f"{note}; {remark}"
        rows.append(Row(label, in_words(estimate, signed=True), note))
    half = truth.half_width()
    if truth.value == 0 or abs(truth.value) <= half:
        return [*rows, Row("predicted / measured", MISSING, "the measured change is within its own error of 0")]
    note = "no error bar on the measured change" if math.isnan(half) else ""
    ratios = {"predicted / measured": trapezoid.value / truth.value, "naive / measured": product.value / truth.value}
    return rows + [Row(label, f"{ratio:.2f}", note) for label, ratio in ratios.items() if not math.isnan(ratio)]


def _sample_row(run: Run) -> Row:
    shares, idle = (run.values(f"ess/{name}").values() for name in ("advantage_fraction", "zero_advantage_prompts"))
    note = "of the sequences carry the update (Kish size of |A|, mean over steps)"
    if idle:
        note += f"; {statistics.fmean(idle):.0%} of the prompts have zero advantage: all their rewards are equal"
    return Row("effective sample", f"{statistics.fmean(shares):.0%}" if shares else MISSING, note)


def _scale_row(run: Run) -> Row:
    """Returns the last noise scale with its interval, and the advice on batch size that follows from batch / scale."""
    label = "noise scale"
    scale, ratio = ([*run.with_interval(f"gns/{name}").values()][-1] for name in ("noise_scale_prompts", "batch_ratio"))
    if scale.interval is None:
        return Row(label, MISSING if math.isnan(scale.value) else f"{scale.value:.0f} prompts", scale.reason)
    (low, high), note = scale.interval, f"95 %; {_advice(*(ratio.interval or (math.nan, math.nan)))}"
    if math.isinf(high):
        return Row(label, "no end to it" if math.isinf(low) else f"above {low:.0f} prompts", note)
    return Row(label, f"{scale.value:.0f} ({low:.0f} … {high:.0f}) prompts", note)


def _advice(low: float, high: float) -> str:
    """Returns the advice on batch size, from the ends of the interval of batch / noise scale."""
    between = f"the batch is {max(low, 0.0):.2f} to {max(high, 0.0):.2f} of it"
    if high < 0.5:
        return f"{between}: larger batches still save steps"
    if low > 2:
        return f"{between}: a smaller batch would learn almost as much in each step"
    if low >= 0.5 and high <= 2:
        return f"{between}: it is about right; beyond it gains shrink"
    return f"{between}: whether another batch size pays is not known yet"
