"""The summary table of a report: what changed, how it was measured, and what that cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rl_training.records.report import findings
from rl_training.records.report.interventions import NO_FALL, Effect, effects_of, halving, keeping
from rl_training.records.report.rates import is_falling
from rl_training.records.report.series import NO_PROBE, Run, finite, last_of, to_estimates
from rl_training.records.report.standing_out.rewards import REWARD_SUM
from rl_training.records.report.story import reward_functions, reward_weights
from rl_training.records.report.verdict import SPENT, judge
from rl_training.records.report.writing import MILLI, MISSING, format_estimate, on_one_line
from rl_training.statistics.estimate import Estimate

STEP_NUMBERS = {  # by label: factor, measured metric, predicted metric of a step's effect
    "entropy, 1e-3 nats per token": (MILLI, "measured/delta_h", "delta_h/forward"),
    "reward, 1e-3": (MILLI, "measured/delta_reward", "delta_reward/forward"),
    "length, tokens": (1.0, "measured/delta_length", "delta_length/forward"),
    "KL to the step before, 1e-3 nats per token": (MILLI, "measured/kl", "kl/forward"),
}
QUESTIONS = {  # by probe: how the names of its metrics begin, and what it answers
    "simple": ("delta_h", "where the entropy goes"),
    "measured": ("measured", "what steps do to each reward"),
    "gns": ("gns", "whether the batch is too small"),
    "token_classes": ("tokens", "which tokens take entropy"),
    "interventions": ("intervention", "what a bonus would do"),
}
MAX_FUNCTIONS = 6  # reward functions with a line of their own
FITTING_BATCH_RATIO = (0.5, 2.0)  # batch over noise scale: outside of this range another batch size pays


class Row(NamedTuple):
    """A line of the summary. If `value` is MISSING, `note` says why."""

    label: str
    value: str
    note: str = ""


def step_numbers(run: Run) -> list[list[str]]:
    """Return the table of STEP_NUMBERS, measured and predicted; [] if fewer than two rows have a number."""
    rows = []
    cut_off = run.logged("completions/clipped_ratio").tolist()[-1:]
    for label, (times, measured, predicted) in STEP_NUMBERS.items():
        estimates = (
            findings.mean_of_last(findings.measured_by_one_step(run, measured)),
            findings.mean_of_last(run.finite_rows(predicted)),
        )
        if any(estimates):
            share = f" ({100 * cut_off[0]:.0f}% of the responses are cut off)" if "length" in label and cut_off else ""
            rows.append([label + share, *(format_estimate(estimate, True, times) for estimate in estimates)])
    return [["change of", "measured", "predicted"], *rows] if len(rows) > 1 else []


def summarize(run: Run) -> list[Row]:
    """Return the lines of the summary: reward, entropy and its change, noise scale, interventions, cost."""
    lines = [
        *_rewards(run), *_changes(run), *_noise_scale(run), *_effective_sample(run), *_interventions(run), _cost(run),
        *_further_probes(run),
    ]  # fmt: skip
    return [Row(*map(on_one_line, line)) for line in lines]


def _rewards(run: Run) -> Iterator[Row]:
    logged = len(run.steps)
    yield Row("steps", str(run.last_step), f"{logged} of them logged" if logged != run.last_step else "")
    acceptance = findings.first_and_last_means(run.logged("buffer/acceptance"))
    drawn = "over all generated responses, with prompts drawn by difficulty; " if acceptance else ""
    yield _from_to("reward", findings.first_and_last_means(run.logged("reward")), drawn)
    yield from _functions(run)
    for label, rows in findings.held_out_rewards(run).items():
        ends = to_estimates(rows.iloc[sorted({0, len(rows) - 1})])
        of = "; ± 95 % over prompts" if all(math.isfinite(end.stderr) for end in ends.values()) else ""
        at = f"step{'s' if len(ends) > 1 else ''} {' and '.join(map(str, ends))}"
        yield Row("held-out reward", " → ".join(map(format_estimate, ends.values())), f"{label}, {at}{of}")
    if acceptance:
        yield _from_to("accepted prompts", acceptance, "share of the prompts generated; ")
    yield _entropy(run)


def _functions(run: Run) -> Iterator[Row]:
    """Yield a line for each of several reward functions: its mean at both ends, and what the steps did to it."""
    functions, weights = reward_functions(run), reward_weights(run)
    for name, values in list(functions.items())[:MAX_FUNCTIONS] if len(functions) > 1 else ():
        total = run.last(f"{REWARD_SUM}/{name}")
        watched = "not paid; " if weights.get(name) == 0 else ""
        ends = " → ".join(f"{mean:.3f}" for mean, _, _ in findings.first_and_last_means(values)) or MISSING
        if total is None:
            note = f"{watched}the probe “measured” would show what the steps do to it"
        else:
            low, high = total.bounds()
            side = "they raise it" if low > 0 else "they lower it" if high < 0 else "0 is within the interval"
            note = f"{watched}the measured effects of all steps add up to {format_estimate(total, True)}: {side}"
        yield Row(f"reward {name}", ends, note)


def _entropy(run: Run) -> Row:
    """Return the line on entropy, at the same steps as the change of entropy below it if a probe measured them."""
    first, last = _span(run)
    levels = run.estimates("entropy/token")
    ends = {step: levels[step] for step in (first, last) if step in levels and math.isfinite(levels[step].value)}
    if not ends:
        by_trl = "" if len(run.rows("entropy/token")) else ", as TRL logs it"
        return _from_to(
            "token entropy", findings.first_and_last_means(run.token_entropy()), f"nats per token{by_trl}; "
        )
    at = f"step{'s' if len(ends) > 1 else ''} {' and '.join(map(str, ends))}"
    error = "; ± 95 %" if all(end.stderr > 0 for end in ends.values()) else ""
    return Row("token entropy", " → ".join(map(format_estimate, ends.values())), f"nats per token, {at}{error}")


def _span(run: Run) -> tuple[int | None, int]:
    """Return the first and last step of the measured change of entropy; None as first if it started in another run."""
    sums = run.rows("delta_h/cumulative_measured")
    last = max(finite(sums).index, default=max(sums.index, default=0))
    return max((step for step in findings.sum_starts(run) if step <= last), default=None), last


def _from_to(label: str, ends: Sequence[tuple[float, int, int]], unit: str) -> Row:
    """Return the line on a number at both ends of the run, from (mean, first step, last step) of each end."""
    if not ends:
        return Row(label, MISSING, "no finite value was logged")
    values = " → ".join(f"{mean:.3f}" for mean, _, _ in ends)
    if len(ends) == 1:
        return Row(label, values, f"{unit}step {ends[0][1]} alone")
    (_, first, last), (_, later, latest) = ends
    if first == last:
        return Row(label, values, f"{unit}steps {first} and {later}")
    return Row(label, values, f"{unit}means over steps {first}–{last} and {later}–{latest}")


def _changes(run: Run) -> Iterator[Row]:
    """Yield the measured change of entropy at the last step that has one, and the sums of predictions up to there."""
    sums = [run.rows(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")]
    first, last = _span(run)
    changes = [Estimate.missing(findings.NO_LATER_BATCH)] * 3
    if first != last:
        absent = Estimate.missing(NO_PROBE)
        changes = [to_estimates(rows).get(last, absent) for rows in (*sums, findings.naive_sums(run))]
    truth, predicted, naive = changes
    if all(math.isnan(estimate.value) for estimate in changes) and len({estimate.reason for estimate in changes}) == 1:
        yield Row("change of entropy", MISSING, truth.reason)
        return
    span = "nats per token" + (f", from step {first} to step {last}" if first is not None else "")
    if findings.sums_began_elsewhere(run):
        span += f", to step {last} from the first step of the run that this one continues"
    notes = {"measured ΔH": span, "predicted ΔH": "sum of trapezoids", "naive product": "sum of same-batch products"}
    for (label, note), change in zip(notes.items(), changes, strict=True):
        error = "± 95 %" if change.stderr > 0 else change.reason or "no error bar"
        yield Row(
            label, format_estimate(change, True), change.reason if math.isnan(change.value) else f"{note}; {error}"
        )
    if truth.value == 0 or abs(truth.value) <= truth.half_width():
        yield Row("predicted / measured", MISSING, "the measured change is not detectably different from 0")
    elif not math.isnan(truth.value):
        no_bar = "no error bar on the measured change" if math.isnan(truth.half_width()) else ""
        for name, change in (("predicted", predicted), ("naive", naive)):
            if not math.isnan(change.value):
                yield Row(f"{name} / measured", f"{change.value / truth.value:.2f}", no_bar)


def _noise_scale(run: Run) -> Iterator[Row]:
    scale, ratio = (last_of(run.with_interval(f"gns/{name}")) for name in ("noise_scale_prompts", "batch_ratio"))
    if scale is None:
        return
    if not scale.interval:
        value = MISSING if math.isnan(scale.value) else f"{scale.value:.0f} prompts"
        yield Row("noise scale", value, scale.reason)
        return
    low, high = scale.interval
    value = f"{scale.value:.0f} ({low:.0f} … {high:.0f}) prompts"
    if math.isinf(high):
        value = "unbounded" if math.isinf(low) else f"above {low:.0f} prompts"
    yield Row("noise scale", value, f"95 %; {_advice(ratio.interval if ratio else None)}")


def _advice(ratio: tuple[float, float] | None) -> str:
    """Say whether another batch size pays, from the 95 % interval of batch size over noise scale."""
    unknown = "whether another batch size pays is not known yet"
    if ratio is None:
        return unknown
    low, high = ratio
    advice = unknown
    if high < FITTING_BATCH_RATIO[0]:
        advice = f"twice the batch would need {_steps_needed(low, 2):.2f} to {_steps_needed(high, 2):.2f} of the steps"
    elif low > FITTING_BATCH_RATIO[1]:
        advice = (
            f"half the batch would need {_steps_needed(high, 0.5):.2f} to {_steps_needed(low, 0.5):.2f} times the steps"
        )
    elif low >= FITTING_BATCH_RATIO[0] and high <= FITTING_BATCH_RATIO[1]:
        advice = "it is about right; beyond it gains shrink"
    return f"the batch is {max(low, 0.0):.2f} to {max(high, 0.0):.2f} of it: {advice}"


def _steps_needed(ratio: float, times: float) -> float:
    """Return by what factor the number of steps changes with a batch of `times` its size.

    Steps are in proportion to 1 + 1/r, where r is the batch over the noise scale (docs/how_to/batch_size.md).

    >>> round(_steps_needed(0.5, 2), 2), round(_steps_needed(2.0, 0.5), 2)
    (0.67, 1.33)
    """
    ratio = max(ratio, 0.0)
    return (ratio + 1 / times) / (ratio + 1)


def _effective_sample(run: Run) -> Iterator[Row]:
    if run.rows("ess/advantage").empty:
        return
    share, idle = (run.values(f"ess/{name}").mean() for name in ("advantage_fraction", "zero_advantage_prompts"))
    note = "of the sequences carry the update (Kish size of |A|, mean over steps)"
    if not math.isnan(idle):
        note += f"; {100 * idle:.0f}% of the prompts have zero advantage: all their rewards are equal"
    yield Row("effective sample", MISSING if math.isnan(share) else f"{100 * share:.0f}%", note)


def _interventions(run: Run) -> Iterator[Row]:
    effects = effects_of(run)
    halve, keep = halving(effects), keeping(effects)
    if effects and judge(run).kind == SPENT:
        yield Row("interventions", "none needed", "entropy is being spent on reward; the page lists what would keep it")
    elif halve:
        strengths = ", ".join(f"{effect.bare_name} {effect.halves_at.value:.2g}" for effect in halve)
        yield Row("interventions", strengths, "would halve the fall, extrapolated from one step; in order of price")
    elif effects and not is_falling(run):
        yield Row("interventions", "none needed", NO_FALL)
    elif keep:
        yield Row("interventions", _names(keep), "would keep entropy, at one step; in order of price")
    elif effects:
        yield Row("interventions", "none", "no measured intervention keeps entropy significantly")


def _names(effects: Sequence[Effect]) -> str:
    return ", ".join(effect.name for effect in effects)


def _further_probes(run: Run) -> Iterator[Row]:
    """Name the probes that answer what this run does not."""
    recorded = {name.partition("/")[0] for name in run.names()}
    absent = {probe: question for probe, (prefix, question) in QUESTIONS.items() if prefix not in recorded}
    if recorded and absent:
        yield Row("not measured", ", ".join(absent), f"probes that tell {'; '.join(absent.values())}")


def _cost(run: Run) -> Row:
    shares = run.logged("probe_cost/fraction_of_step")
    if shares.empty:
        return Row("probe cost", MISSING, "no probe was timed")
    return Row(
        "probe cost",
        f"{100 * shares.sum() / len(run.steps):.1f}%",
        f"of a step's time, mean over all steps; {100 * shares.max():.1f}% at the most expensive of the {len(shares)} "
        "measured ones",
    )
