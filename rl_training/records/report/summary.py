"""What a report says of a run in words: how it opens, the lines of its summary, and what a step does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import difference, is_significant
from rl_training.records.report.findings import (
    NO_LATER_BATCH,
    alerts,
    goes_on,
    held_out_rewards,
    mean_of_last,
    measured_by_one_step,
    naive_of,
    origins,
    present_rate,
)
from rl_training.records.report.interventions import verdict_of_run
from rl_training.records.report.series import NO_PROBE, Run, finite, last_of, to_estimates
from rl_training.records.report.words import MILLI, MISSING, in_words, sentences, times_in_words

MAX_WINDOW = 5  # logged steps averaged at either end of a run: one batch alone is too noisy to compare
AHEAD = 20  # steps of the alert: what can be told best
UNCERTAIN = 0.5  # error of a single step over its change, above which it is said
REACH = 0.35  # KL per token times tokens at which importance weights leave half of the sequences: ESS/N ≈ exp(−2 KL T)
SURVIVING = 0.9  # share of a step: with less, what is lost to rounding is said
STEP_NUMBERS: dict[
    str, tuple[float, tuple[str, str]]
] = {  # what a step does: how it is shown, as it was measured, as it was predicted
    "entropy, 1e-3 nats per token": (MILLI, ("measured/delta_h", "delta_h/forward")),
    "reward, 1e-3": (MILLI, ("measured/delta_reward", "delta_reward/forward")),
    "length, tokens": (1.0, ("measured/delta_length", "delta_length/forward")),
    "KL to the step before, 1e-3 nats per token": (MILLI, ("measured/kl", "kl/forward")),
}


class Row(NamedTuple):
    """A line of the summary. `value` is MISSING when it is not available, and `note` then says why."""

    label: str
    value: str
    note: str = ""


def opening(run: Run) -> list[str]:
    """Returns the sentences that open: does it learn, is entropy collapsing, how fast, are the predictions right."""
    rewards, spreads = set(run.logged("reward").values()), set(run.logged("reward_std").values())
    both = [run.known(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")]
    last = both[0].index.intersection(both[1].index, sort=False)[-1:]
    truth, total = (last_of(rows.loc[last]) for rows in both)
    share = run.known("update/surviving_share")["value"].tail(1).min()
    error, needed = (last_of(run.known(f"delta_h/{name}")) for name in ("relative_error", "needed_prompts"))
    return sentences(
        "opening",
        only_reward=rewards.pop() if len(rewards) == 1 and spreads == {0.0} else None,
        levels=ends_of(run.token_entropy()),
        rate=present_rate(run),
        one_step=(error, needed) if error and needed and error.value > UNCERTAIN else None,
        sums=(truth, total, difference(total, truth)) if truth and total and total.stderr != 0 else None,
        lost=1 - share if share < SURVIVING else None,
    )


def ends_of(values: Mapping[int, float]) -> list[float]:
    """Returns the means over the first few values and over the last; nothing of fewer than two."""
    window = min(MAX_WINDOW, len(values) // 2)
    listed = list(values.values())
    return [statistics.fmean(listed[:window]), statistics.fmean(listed[-window:])] if window else []


def step_numbers(run: Run) -> list[list[str]]:
    """Returns a row for each of STEP_NUMBERS, measured and predicted; none where there is only one."""
    rows, clipped = [], list(run.logged("completions/clipped_ratio").values())[-1:]
    for label, (times, metrics) in STEP_NUMBERS.items():
        measured, predicted = metrics
        found = [mean_of_last(measured_by_one_step(run, measured)), mean_of_last(run.known(predicted))]
        if any(found):
            if "length" in label and clipped:
                label += f" ({clipped[0]:.0%} of the responses are cut off)"
            rows.append([label, *(times_in_words(rate, times) for rate in found)])
    return rows if len(rows) > 1 else []


def sampler_sentences(run: Run) -> list[str]:
    """Returns how far the policy that generated is from the one that is trained; nothing where that is not recorded."""
    names = ("kl", "ess", "ratio_outside", "mean_ratio", "reward_gap", "corrected_share", "numerics_kl")
    found = {name: last_of(run.known(f"sampler/{name}")) for name in names}
    kl, mean = found["kl"], found["mean_ratio"]
    not_1 = mean is not None and is_significant(difference(mean, Estimate(1.0, 0.0, mean.num_samples)))
    reach = float(f"{REACH / kl.value:.2g}") if kl and kl.value > 0 else math.inf
    return sentences("sampler", **found, not_1=not_1, reach=reach)


def summarize(run: Run) -> list[Row]:
    """Returns the lines of the summary: where reward and entropy went, and predicted against measured change."""
    logged, last = len(run.steps), run.last_step
    unit = "nats per token; " if len(run.measured("entropy/token")) else "nats per token, as TRL logs it; "
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
    if len(run.measured("gns/noise_scale_prompts")):
        rows.append(_scale_row(run))
    if len(run.measured("ess/advantage")):
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
    note = f"of a step's time, mean over all steps; {max(shares):.1%} at the dearest of the {len(shares)} measured ones"
    return Row("probe cost", f"{sum(shares) / len(run.steps):.1%}", note)


def _held_out_row(label: str, rewards: pd.DataFrame) -> Row:
    """Returns the row of the reward on prompts that training never sees, at the first and the last evaluated step."""
    ends = to_estimates(pd.concat([rewards.head(1), rewards.iloc[1:].tail(1)]))
    value = " → ".join(map(in_words, ends.values()))
    error = "; ± 95 % over prompts" if all(math.isfinite(end.stderr) for end in ends.values()) else ""
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
    value = " → ".join(f"{end:.3f}" for end in ends_of(values))
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
    sums = [run.measured(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")]
    known = finite(sums[0]).index if len(finite(sums[0])) else sums[0].index
    last = max(known, default=0)
    first = max((step for step in origins(run) if step <= last), default=None)
    span = "nats per token" if first is None else f"nats per token, from step {first} to step {last}"
    if goes_on(run):
        span += f", to step {last} from the first step of the run that this one continues"
    truth = trapezoid = product = Estimate.missing(NO_LATER_BATCH)
    if first != last:
        absent = Estimate.missing(NO_PROBE)
        truth, trapezoid, product = (to_estimates(rows).get(last, absent) for rows in (*sums, naive_of(run)))
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
    shares, idle = (run.known(f"ess/{name}")["value"] for name in ("advantage_fraction", "zero_advantage_prompts"))
    note = "of the sequences carry the update (Kish size of |A|, mean over steps)"
    if len(idle):
        note += f"; {idle.mean():.0%} of the prompts have zero advantage: all their rewards are equal"
    return Row("effective sample", f"{shares.mean():.0%}" if len(shares) else MISSING, note)


def _scale_row(run: Run) -> Row:
    """Returns the last noise scale with its interval, and the advice on batch size that follows from batch / scale."""
    label = "noise scale"
    scale, ratio = (last_of(run.with_interval(f"gns/{name}")) for name in ("noise_scale_prompts", "batch_ratio"))
    if scale is None or scale.interval is None:
        return Row(label, f"{scale.value:.0f} prompts" if scale and scale.value == scale.value else MISSING,
                   scale.reason if scale else "")  # fmt: skip
    (low, high), ends = scale.interval, ratio.interval if ratio else None
    note = f"95 %; {_advice(*(ends or (math.nan, math.nan)))}"
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
