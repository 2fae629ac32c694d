"""Series → the lines of the summary, the same for the terminal and the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from rl_training.mathematics.estimate import Estimate
from rl_training.records.report.forecast import AHEAD, alerts
from rl_training.records.report.series import (
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
MILLI = 1e3  # changes of a step are shown in thousandths
MAX_WINDOW = 5  # logged steps averaged at either end of a run: one batch alone is too noisy to compare


@dataclass(frozen=True)
class Row:
    """A line of the summary. `value` is MISSING when it is not available, and `note` then says why."""

    label: str
    value: str
    note: str = ""


def summarize(run: Run) -> list[Row]:
    """Returns the lines of the summary: where reward and entropy went, and predicted against measured change."""
    steps = [int(line["step"]) for line in run.metrics]
    unit = "nats per token; " if run.measured("entropy/token") else "nats per token, as TRL logs it; "
    acceptance = run.logged("buffer/acceptance")
    drawn = "of all that was generated, prompts drawn by difficulty; " if acceptance else ""
    kept = "share of the prompts generated; "
    return [
        Row("steps", str(steps[-1]), "" if len(steps) == steps[-1] else f"{len(steps)} of them logged"),
        _first_to_last("reward", run.logged("reward"), drawn),
        *(_held_out_row(label, rewards) for label, rewards in held_out_rewards(run).items()),
        *([_first_to_last("accepted prompts", acceptance, kept)] if acceptance else []),
        _first_to_last("token entropy", run.token_entropy(), unit),
        *_alert_rows(run),
        *_change_rows(run),
        *_batch_rows(run),
        _cost_row(run),
    ]


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
    value = f"at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" if steps else "none"
    note = f"forecast below its level within {AHEAD} steps; {right} of the {checked} that could be checked were right"
    return [Row("alerts", value, note if steps else f"entropy was never likely to be below its level in {AHEAD} steps")]


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
    rows = [
        _change_row("measured ΔH", truth, span),
        _change_row("predicted ΔH", trapezoid, "sum of trapezoids"),
        _change_row("naive product", product, "sum of same-batch products"),
    ]
    reasons = {row.note if row.value == MISSING else "" for row in rows}
    if len(reasons) == 1 and "" not in reasons:  # three lines would say the same
        return [Row("change of entropy", MISSING, *reasons)]
    return rows + _ratio_rows({"predicted": trapezoid, "naive": product}, truth)


def _change_row(label: str, estimate: Estimate, note: str) -> Row:
    if math.isnan(estimate.value):
        return Row(label, MISSING, estimate.reason)
    has_error = math.isfinite(estimate.stderr) and estimate.stderr > 0
    remark = "± 95 %" if has_error else estimate.reason or "no error bar"
    return Row(label, in_words(estimate, signed=True), f"{note}; {remark}")


def in_words(estimate: Estimate | None, signed: bool = False) -> str:
    """Returns value ± half width of the 95 % interval, with two digits of the latter; MISSING without a value.

    Of an interval that is not symmetric: value (low … high).
    """
    if estimate is None or math.isnan(estimate.value):
        return MISSING
    sign, (low, high) = "+" if signed else "", estimate.ends()
    half = max((abs(end - estimate.value) for end in (low, high) if math.isfinite(end)), default=math.nan)
    if estimate.interval and half > 0:
        decimals = _decimals(half)
        low_told, high_told = (f"{end:{sign}.{decimals}f}".replace("inf", "∞") for end in (low, high))
        return f"{estimate.value:{sign}.{decimals}f} ({low_told} … {high_told})"
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


def _decimals(half: float) -> int:
    """Returns how many decimals say two digits of a half width: the rest of the value is noise."""
    return max(0, 1 - math.floor(math.log10(half)))


def _ratio_rows(parts: Mapping[str, Estimate], whole: Estimate) -> list[Row]:
    """Returns the rows of the ratios that are available; the rows of their inputs say why others are not."""
    half = whole.half_width()
    if whole.value == 0 or abs(whole.value) <= half:
        return [Row("predicted / measured", MISSING, "the measured change is within its own error of 0")]
    note = "no error bar on the measured change" if math.isnan(half) else ""
    ratios = {f"{label} / measured": part.value / whole.value for label, part in parts.items()}
    return [Row(label, f"{ratio:.2f}", note) for label, ratio in ratios.items() if not math.isnan(ratio)]


def _batch_rows(run: Run) -> list[Row]:
    """Returns what the noise scale and the effective sample size say of the batch, as far as they were measured."""
    rows = []
    if run.measured("gns/noise_scale_prompts"):
        rows.append(
            _scale_row(*(_with_interval(run, f"gns/{name}") for name in ("noise_scale_prompts", "batch_ratio")))
        )
    if run.measured("ess/advantage"):
        shares = [e.value for e in run.known("ess/advantage_fraction").values()]
        idle = [e.value for e in run.known("ess/zero_advantage_prompts").values()]
        value = f"{statistics.fmean(shares):.0%}" if shares else MISSING
        note = "of the sequences carry the update (Kish size of |A|, mean over steps)"
        if idle:
            note += f"; {statistics.fmean(idle):.0%} of the prompts have zero advantage: all their rewards are equal"
        rows.append(Row("effective sample", value, note))
    return rows


def _with_interval(run: Run, name: str) -> tuple[Estimate, float, float]:
    """Returns the last estimate, and the ends of its interval; nan where they are not known."""
    *_, estimate = run.with_interval(name).values()
    return estimate, *(estimate.interval or (math.nan, math.nan))


def _scale_row(scale: tuple[Estimate, float, float], ratio: tuple[Estimate, float, float]) -> Row:
    label, (value, low, high) = "noise scale", scale
    if math.isnan(low):
        return Row(label, MISSING if math.isnan(value.value) else f"{value.value:.0f} prompts", value.reason)
    note = f"95 %; {_advice(*ratio[1:])}"
    if math.isinf(high):
        return Row(label, "no end to it" if math.isinf(low) else f"above {low:.0f} prompts", note)
    return Row(label, f"{value.value:.0f} ({low:.0f} … {high:.0f}) prompts", note)


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


def _cost_row(run: Run) -> Row:
    values = list(run.logged("probe_cost/fraction_of_step").values())
    if not values:
        return Row("probe cost", MISSING, "no probe was timed")
    note = f"of a step's time; median over the measured steps ({len(values)})"
    return Row("probe cost", f"{100 * statistics.median(values):.1f} %", note)


@dataclass(frozen=True)
class EvaluationTable:
    """The metrics of an evaluation, a column per checkpoint."""

    name: str
    steps: list[int]
    rows: list[tuple[str, list[str]]]  # metric, cells


def evaluation_tables(run: Run) -> list[EvaluationTable]:
    """Returns all numbers of the run's evaluations as value ± standard error, MISSING where there is none.

    Where all prompts agree there is no error; a share then shows its 95 % interval: 1 (0.839 … 1).
    """
    tables = []
    for name, metrics in run.of_checkpoints.items():
        steps = sorted({step for by_step in metrics.values() for step in by_step})
        rows = [(metric, [_with_error(by_step.get(step)) for step in steps]) for metric, by_step in metrics.items()]
        tables.append(EvaluationTable(name, steps, rows))
    return tables


def _with_error(estimate: Estimate | None) -> str:
    if estimate is None or math.isnan(estimate.value):
        return MISSING
    if estimate.stderr > 0:
        return f"{estimate.value:.4g} ± {estimate.stderr:.2g}"
    interval = " ({:.3g} … {:.3g})".format(*estimate.interval) if estimate.interval else ""
    return f"{estimate.value:.4g}{interval}"
