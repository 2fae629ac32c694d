"""What a report says of a run in words: how it opens, the lines of its summary, and how an estimate is written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import difference, is_significant
from rl_training.records.report.interventions import verdict_of_run
from rl_training.records.report.predictions import AHEAD, alerts
from rl_training.records.report.series import (
    NO_LATER_BATCH,
    NO_PROBE,
    Run,
    finite,
    goes_on,
    held_out_rewards,
    naive_of,
    origins,
    present_rate,
)
from rl_training.records.report.words import MISSING, in_words

MAX_WINDOW = 5  # logged steps averaged at either end of a run: one batch alone is too noisy to compare


class Row(NamedTuple):
    """A line of the summary. `value` is MISSING when it is not available, and `note` then says why."""

    label: str
    value: str
    note: str = ""


def opening(run: Run) -> list[str]:
    """Returns up to four sentences: does it learn, is entropy collapsing, how fast, are the predictions right here."""
    return [sentence for sentence in (_no_signal(run), _level(run), _rate(run), _trust(run)) if sentence]


def _no_signal(run: Run) -> str:
    """Returns the warning that all responses have earned the same reward: then nothing is learned."""
    rewards, spreads = set(run.logged("reward").values()), set(run.logged("reward_std").values())
    if len(rewards) != 1 or spreads != {0.0}:
        return ""
    return (
        f"Every response has earned the same reward, {rewards.pop():g}: all advantages are 0, and nothing is learned "
        "from them. Easier prompts, more responses to each, or a reward for a part of the answer would give a signal."
    )


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
    rate = present_rate(run)
    if rate is None:
        return ""
    steps = int(rate.detail["steps"])
    over = f"over the last {steps} steps" if steps > 1 else "by the last step"
    figures = f"{in_words(rate, signed=True)} nats a step {over}"
    if not is_significant(rate):
        return f"It does not detectably move now ({figures})."
    return f"It is {'predicted to rise' if rate.value > 0 else 'falling'} now: {figures}."


def _trust(run: Run) -> str:
    measured, predicted = (run.known(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted"))
    steps = [step for step in measured if step in predicted]
    if not steps or predicted[steps[-1]].stderr == 0:
        return ""
    truth, sum_of_predictions = measured[steps[-1]], predicted[steps[-1]]
    apart = difference(sum_of_predictions, truth)
    if math.isnan(apart.stderr):
        return "Whether the predictions can be trusted is unknown: predictions or measurements have no error bar."
    total = in_words(sum_of_predictions, signed=True)
    figures = f"they add up to {total} nats, and {in_words(truth, signed=True)} was measured"
    if is_significant(apart):
        return f"Do not trust the predictions here: {figures}, which is further apart than their errors allow."
    return f"The predictions hold so far: {figures}."


def summarize(run: Run) -> list[Row]:
    """Returns the lines of the summary: where reward and entropy went, and predicted against measured change."""
    logged, last = len(run.metrics), run.last_step
    unit = "nats per token; " if run.measured("entropy/token") else "nats per token, as TRL logs it; "
    acceptance = run.logged("buffer/acceptance")
    drawn = "of all that was generated, prompts drawn by difficulty; " if acceptance else ""
    rows = [
        Row("steps", str(last), "" if logged == last else f"{logged} of them logged"),
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
    choice, meaning = verdict_of_run(run)
    if choice:
        rows.append(Row("interventions", choice, meaning))
    return [*rows, _cost_row(run)]


def _cost_row(run: Run) -> Row:
    """Returns the mean share of the probes in a step's time, with the largest: few steps may be measured in full."""
    shares = list(run.logged("probe_cost/fraction_of_step").values())
    if not shares:
        return Row("probe cost", MISSING, "no probe was timed")
    mean, largest = sum(shares) / len(run.metrics), max(shares)
    note = f"of a step's time, mean over all steps; {largest:.1%} at the dearest of the {len(shares)} measured ones"
    return Row("probe cost", f"{mean:.1%}", note)


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
        return [*rows, Row("predicted / measured", MISSING, "the measured change is not detectably different from 0")]
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
