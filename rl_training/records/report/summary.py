"""The summary table of a report: what changed, how it was measured, and what that cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from rl_training.records.report import findings, tokens
from rl_training.records.report.broken_line import broken_line
from rl_training.records.report.interventions import (
    NO_FALL,
    STILL_FALLS,
    Effect,
    earned_per_nat,
    effects_of,
    halving,
    keeping,
    still_falls,
)
from rl_training.records.report.own_probes import BUILT_IN
from rl_training.records.report.rates import is_falling
from rl_training.records.report.series import NO_PROBE, Run, finite, last_of, to_estimates
from rl_training.records.report.set_up import SetUp
from rl_training.records.report.story import REWARD_SUM, Levels, Story, levels_of, reward_functions, reward_weights
from rl_training.records.report.trends import MIN_STEPS, RECENT
from rl_training.records.report.verdict import NOTABLE, NOTHING_TO_DO, UNKNOWN, Verdict, is_cheap, judge
from rl_training.records.report.writing import MILLI, MISSING, format_estimate, on_one_line, percent, steps_of
from rl_training.statistics.estimate import Estimate
from rl_training.version import REPOSITORY

STEP_NUMBERS = {  # by label: factor, measured metric, predicted metric of a step's effect
    "entropy, 1e-3 nats per token": (MILLI, "measured/delta_h", "delta_h/forward"),
    "reward, 1e-3": (MILLI, "measured/delta_reward", "delta_reward/forward"),
    "length, tokens": (1.0, "measured/delta_length", "delta_length/forward"),
    "KL to the step before, 1e-3 nats per token": (MILLI, "measured/kl", "kl/forward"),
}
QUESTIONS = {  # by probe: how the names of its metrics begin, and what it answers
    "simple": ("delta_h", "where the entropy goes"),
    "measured": ("measured", "what each step does to every reward"),
    "gns": ("gns", "whether the batch is too small"),
    "token_classes": ("tokens", "which tokens take entropy"),
    "interventions": ("intervention", "what an entropy bonus or another loss would do"),
}
MAX_FUNCTIONS = 6  # reward functions with a line of their own
MIN_MEASURED = 0.8  # share of the steps that must have been measured for a mean of them
FITTING_BATCH_RATIO = (0.5, 2.0)  # batch over noise scale: outside of this range another batch size pays


class Link(NamedTuple):
    """Where a line of the summary sends the reader: a page of the documentation, or a section of the report."""

    text: str
    address: str


class Row(NamedTuple):
    """A line of the summary. If `value` is MISSING, `note` says why."""

    label: str
    value: str
    note: str = ""
    see: Link | None = None
    quotes: bool = False  # whether the note quotes a response, in which nothing is a setting


def how_to(name: str) -> Link:
    """Return the link to a how-to of the documentation."""
    path = f"docs/how_to/{name}.md"
    return Link(path, f"{REPOSITORY}/blob/main/{path}")


def step_numbers(run: Run) -> list[list[str]]:
    """Return the table of STEP_NUMBERS, measured and predicted; [] if fewer than two rows have a number.

    Both columns are means over the same steps, the last ten that have both numbers; or over each one's own last ten.
    Where too many steps could not be measured, there is no mean: those that could are the ones that moved least.
    """
    rows, windows, explained = list[list[str]](), list[str](), set[str]()
    cut_off = run.logged("completions/clipped_ratio").tolist()[-1:]
    for label, (times, measured, predicted) in STEP_NUMBERS.items():
        columns = [by_step(findings.measured_by_one_step(run, measured)), by_step(run.finite_rows(predicted))]
        both = columns[0].index.intersection(columns[1].index)
        known = (columns[0].loc[both] if len(both) else columns[0]).tail(RECENT)
        asked = run.rows(measured)
        of_asked, told = _measured_steps(asked, known, columns[0])
        is_known = told >= MIN_MEASURED * of_asked
        columns = [known, (columns[1].loc[both] if len(both) and is_known else columns[1]).tail(RECENT)]
        if any(map(len, columns)):
            share = f" ({percent(cut_off[0])} of the responses are cut off)" if "length" in label and cut_off else ""
            means = [format_estimate(findings.mean_of_rows(rows), True, times) for rows in columns]
            if not is_known:
                last = list(to_estimates(asked[~asked.index.isin(finite(asked).index)]).values())[-1]
                is_new = (last.code or last.reason) not in explained  # each reason once in the table
                explained.add(last.code or last.reason)
                why = f": {last.reason.partition(':')[0]}" * is_new
                means[0], columns[0] = f"{MISSING} (known of {told} of {of_asked} steps{why})", columns[0].iloc[:0]
            rows.append([label + share, *means])
            window = " and ".join(dict.fromkeys(steps_of(rows.index) for rows in columns if len(rows)))
            windows.append(f"{told} of {of_asked} steps, {window}" if is_known and told < of_asked else window)
    if len(rows) < 2:
        return []
    is_one = len(set(windows)) == 1
    if not is_one:
        rows = [
            [f"{label}, {window}" if window else label, *cells]
            for (label, *cells), window in zip(rows, windows, strict=True)
        ]
    return [[f"by one step, mean of {windows[0]}" if is_one else "by one step, mean", "measured", "predicted"], *rows]


def _measured_steps(asked: pd.DataFrame, shown: pd.DataFrame, known: pd.DataFrame) -> tuple[int, int]:
    """Return how many steps a metric was to be measured at since the first shown one, and at how many it was.

    Args:
        asked: All rows of the metric, also those without a value.
        shown: The rows that are to be averaged, by the step that they are about.
        known: All rows with a value, likewise.
    """
    first = shown.index.min() if len(shown) else 0
    steps = asked["about_step"].fillna(asked.index.to_series()).unique()
    return int((steps >= first).sum()), int((known.index >= first).sum())


def by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Return these rows by the step that they are about, where that is recorded."""
    return rows.set_index(rows["about_step"].fillna(rows.index.to_series()).astype(int))


def summarize(run: Run) -> list[Row]:
    """Return the lines of the summary: reward, entropy and its change, noise scale, interventions, cost."""
    verdict = judge(run)
    lines = [
        *_levels(run, verdict.story), *_further_probes(run), *_tokens(run), *_interventions(run, verdict),
        *_noise_scale(run), *_effective_sample(run), *_changes(run), _cost(run),
    ]  # fmt: skip
    return [
        Row(on_one_line(label), on_one_line(value), on_one_line(note), see, quotes)
        for label, value, note, see, quotes in lines
    ]


def _levels(run: Run, story: Story) -> Iterator[Row]:
    logged = len(run.steps)
    yield Row("steps", str(run.last_step), f"{logged} of them logged" if logged != run.last_step else "")
    accepted = run.logged("buffer/acceptance")
    drawn = "over all generated responses, with prompts drawn by difficulty; " if len(accepted) else ""
    rewards = story.levels.get("reward")
    yield _from_to("reward", rewards, drawn + rewards.window if rewards else "")
    yield from _functions(run, story)
    yield from _hacked(run, story)
    for label, rows in findings.held_out_rewards(run).items():
        ends = to_estimates(rows.iloc[sorted({0, len(rows) - 1})])
        of = "; ± 95 % over prompts" if all(math.isfinite(end.stderr) for end in ends.values()) else ""
        at = f"step{'s' if len(ends) > 1 else ''} {' and '.join(map(str, ends))}"
        yield Row("held-out reward", " → ".join(map(format_estimate, ends.values())), f"{label}, {at}{of}")
    if len(accepted):
        levels = levels_of(accepted, broken_line(accepted))
        yield _from_to("accepted prompts", levels, f"share of the prompts generated{_unless_said(levels, rewards)}")
    entropies = story.levels.get("token entropy")
    by_trl = "" if len(run.rows("entropy/token")) else ", as TRL logs it"
    unit = f"nats per token{by_trl}"
    yield _from_to("token entropy", entropies, unit + _unless_said(entropies, rewards) if entropies else "")


def _from_to(label: str, levels: Levels | None, note: str) -> Row:
    return Row(label, levels.text, note) if levels else Row(label, MISSING, "no finite value was logged")


def _unless_said(levels: Levels, said: Levels | None) -> str:
    """Return the window of a number if it is not that of the line on reward, which has said it."""
    return f"; {levels.window}" if said is None or levels.window != said.window else ""


def _functions(run: Run, story: Story) -> Iterator[Row]:
    """Yield a line for each of several reward functions: its mean at both ends, and what the steps did to it."""
    functions, weights = reward_functions(run), reward_weights(run)
    is_measured = any(name.startswith("measured/") for name in run.names())
    for name in list(functions)[:MAX_FUNCTIONS] if len(functions) > 1 else ():
        total = run.last(f"{REWARD_SUM}/{name}")
        watched = "not paid; " if weights.get(name) == 0 else ""
        if total is None and is_measured:
            note = f"{watched}what the steps do to it was not measured"
        elif total is None:
            note = f"{watched}the probe “measured” would show what the steps do to it"
        else:
            low, high = total.bounds()
            side = "they raise it" if low > 0 else "they lower it" if high < 0 else "0 is within the interval"
            what = f"the measured effects {findings.of_steps(total, 'of all steps')} add up to"
            note = f"{watched}{what} {format_estimate(total, True)}: {side}"
        yield _from_to(f"reward {name}", story.levels.get(name), note)


def _hacked(run: Run, story: Story) -> Iterator[Row]:
    """Yield the line on whether a reward is earned at the cost of another, or what this run lacks to tell."""
    label, see = "is it hacked?", how_to("is_it_hacked")
    fallen = [part.name for part in story.parts if part.fall and not is_cheap(part, story.reward)]
    cheap = [part.name for part in story.parts if part.fall and part.name not in fallen]
    risen = [part.name for part in story.parts if part.has_risen and not part.fall]
    number = len(reward_functions(run))
    if "reward" not in story.levels:
        return
    if number < 2:
        second = "give a second one, with weight 0 if it must not be paid"
        yield Row(label, "not checked", f"one reward function: nothing to compare it with; {second}", see)
    elif story.logged < MIN_STEPS:
        yield Row(label, "not known yet", f"{MIN_STEPS} logged steps are needed to tell", see)
    elif fallen:
        while_others = f" while {' and '.join(risen)} rose" if risen else ""
        yield Row(label, "perhaps", f"{' and '.join(fallen)} fell{while_others}: read responses", see)
    else:
        aside = ", penalties aside," if len(story.parts) < len(story.functions) else ""
        note = f"none of the {number} reward functions{aside} has fallen"
        if cheap:
            note = f"{' and '.join(cheap)} fell, at less than {percent(NOTABLE)} of what the others gained"
        note += "; what all of them pay for is not seen"
        yield Row(label, "no sign of it", note, see)


def _span(run: Run) -> tuple[int | None, int]:
    """Return the first and last step of the measured change of entropy; None as first if it started in another run."""
    sums = run.rows("delta_h/cumulative_measured")
    last = max(finite(sums).index, default=max(sums.index, default=0))
    return max((step for step in findings.sum_starts(run) if step <= last), default=None), last


def _changes(run: Run) -> Iterator[Row]:
    """Yield the measured change of entropy at the last step that has one, and the sums of predictions up to there."""
    sums = [run.rows(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")]
    first, last = _span(run)
    changes = [Estimate.missing(findings.NO_LATER_BATCH)] * 3
    if first != last:
        absent = Estimate.missing(NO_PROBE)
        changes = [to_estimates(rows).get(last, absent) for rows in (*sums, findings.naive_sums(run))]
    truth, predicted, naive = changes
    if all(math.isnan(estimate.value) for estimate in changes) and len({e.code or e.reason for e in changes}) == 1:
        yield Row("change of entropy", MISSING, truth.reason)
        return
    span = "nats per token" + (f", batch of step {last} minus that of step {first}" if first is not None else "")
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
    see = how_to("batch_size")
    if not scale.interval:
        value = MISSING if math.isnan(scale.value) else f"{scale.value:.0f} prompts"
        yield Row("noise scale", value, scale.reason, see)
        return
    low, high = scale.interval
    value = f"{scale.value:.0f} ({low:.0f} … {high:.0f}) prompts"
    if math.isinf(high):
        value = "unbounded" if math.isinf(low) else f"above {low:.0f} prompts"
    advice = _batch_size(ratio.interval if ratio else None, scale.interval)
    yield Row("noise scale", value, f"95 %; {advice}", see)


def _batch_size(ratio: tuple[float, float] | None, scale: tuple[float, float]) -> str:
    """Say what a batch would save that the whole interval calls for: at least twice the present one, or half of it.

    Args:
        ratio: 95 % interval of batch size over noise scale.
        scale: 95 % interval of the noise scale, in prompts.
    """
    if ratio is None:
        return "whether another batch size pays is not known yet"
    low, high = (max(end, 0.0) for end in ratio)
    said = f"the batch is {low:.2f} to {high:.2f} of it"
    if low >= FITTING_BATCH_RATIO[0] and high <= FITTING_BATCH_RATIO[1]:
        return f"{said}: it is about right; beyond it gains shrink"
    batch = low * scale[1] if math.isfinite(scale[1]) else high * scale[0]  # in prompts
    if high < 1:  # twice the batch, or the lower end of the noise scale if that is more
        times = max(2.0, 1 / high) if high > 0 else 2.0
    elif low > 1:
        times = 0.5
    else:
        return f"{said}: it may be too small or too large; more steps will tell"
    size = f"{times * batch:.0f} prompts a step" if math.isfinite(times * batch) else "twice the batch"
    steps = [_steps_needed(end, times) for end in (low, high)]
    responses = [times * factor for factor in steps]
    return f"{said}: {size} would take about {_more(steps, 'steps')} and {_more(responses, 'responses')}"


def _more(factors: Sequence[float], of: str) -> str:
    """Return a range of factors as percent more or fewer, such as "15 to 24 % fewer steps"."""
    low, high = sorted(abs(round(100 * (factor - 1))) for factor in factors)
    if high == 0:
        return f"as many {of}"
    word = "more" if sum(factors) > len(factors) else "fewer"
    return f"{low} % {word} {of}" if low == high else f"{low} to {high} % {word} {of}"


def _steps_needed(ratio: float, times: float) -> float:
    """Return by what factor the number of steps changes with a batch of `times` its size.

    Steps are in proportion to 1 + 1/r, where r is the batch over the noise scale (docs/how_to/batch_size.md).

    >>> round(_steps_needed(0.5, 2), 2), round(_steps_needed(2.0, 0.5), 2)
    (0.67, 1.33)
    """
    return (ratio + 1 / times) / (ratio + 1)


def _effective_sample(run: Run) -> Iterator[Row]:
    shares, idle = (run.values(f"ess/{name}").tail(RECENT) for name in ("advantage_fraction", "zero_advantage_prompts"))
    if run.rows("ess/advantage").empty:
        return
    at = f", mean of {steps_of(shares)}" if len(shares) else ""
    note = f"of the sequences carry the update (Kish size of |A|{at})"
    if len(idle):
        note += f"; {percent(idle.mean())} of the prompts have zero advantage: all their rewards are equal"
    yield Row("effective sample", percent(shares.mean()) if len(shares) else MISSING, note)


def _tokens(run: Run) -> Iterator[Row]:
    """Yield the line on the token that takes most entropy."""
    told = tokens.heaviest(run)
    if told:
        yield Row("token that surely takes most", *told, Link(tokens.TITLE, f"#{tokens.ANCHOR}"), quotes=True)


def _interventions(run: Run, verdict: Verdict) -> Iterator[Row]:
    effects = effects_of(run)
    halve, keep = halving(effects), keeping(effects)
    if not effects:
        return
    if still_falls(run, verdict.kind):
        yield Row("interventions", "not certain", f"{STILL_FALLS}: more steps will tell")
    elif verdict.kind in NOTHING_TO_DO:
        listed = "; the page lists what would keep entropy, and its price" * bool(halve or keep)
        value = "none needed yet" if verdict.kind == UNKNOWN else "none needed"
        yield Row("interventions", value, NOTHING_TO_DO[verdict.kind] + listed)
    elif halve:
        strengths = ", ".join(f"{effect.bare_name} {effect.halves_at.value:.2g}" for effect in halve)
        how = "would halve the fall, extrapolated from one step"
        yield Row("interventions", strengths, f"{how}; {_prices(run, halve)}")
    elif not is_falling(run):
        yield Row("interventions", "nothing to halve", NO_FALL)
    elif keep:
        names = ", ".join(effect.name for effect in keep)
        yield Row("interventions", names, f"would keep entropy, at one step; {_prices(run, keep)}")
    else:
        yield Row("interventions", "none", "no measured intervention keeps entropy significantly")


def _prices(run: Run, effects: Sequence[Effect]) -> str:
    """Say what each intervention costs, in their order, and what plain steps earn."""
    known = {effect.bare_name: effect.price for effect in effects if math.isfinite(effect.price.value)}
    if not known:
        return "what they cost in reward is not known yet"
    prices = ", ".join(f"{name} {format_estimate(price)}" for name, price in known.items())
    earned = earned_per_nat(run)
    yardstick = "" if math.isnan(earned) else f" (plain steps earn {earned:.2g} per nat that they spend)"
    return f"reward that a nat kept costs: {prices}{yardstick}"


def _further_probes(run: Run) -> Iterator[Row]:
    """Name the probes that were off, what each would have told, and the setting that turns them on."""
    recorded = {name.partition("/")[0] for name in run.names()}
    absent = {probe: question for probe, (prefix, question) in QUESTIONS.items() if prefix not in recorded}
    if recorded and absent:
        told = "; ".join(f"{probe}: {question}" for probe, question in absent.items())
        on = [probe for probe in BUILT_IN if (run.table["probe"] == probe).any()]  # also those without a question
        how = f"to turn them on, {SetUp.of(run).probes(*on, *absent)}"
        yield Row("probes that were off", str(len(absent)), f"{told}; {how}")


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
