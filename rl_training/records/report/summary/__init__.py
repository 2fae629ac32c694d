"""The summary table of a report: what changed, how it was measured, and what that cost.

level_rows.py     steps, rewards (also held out; is it hacked?), accepted prompts and entropy, at both ends of the run
changes.py        the change of entropy: measured, predicted and naive
batch.py          noise scale and effective sample
step_numbers.py   what one step does: a table of its own
row.py            a row

Here: the probes that were off, the token that takes most, interventions, and the probes' cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rl_training.records.pages.writing import MISSING, format_estimate, on_one_line
from rl_training.records.report.interventions.section import STILL_FALLS, is_fine, still_falls
from rl_training.records.report.sections import tokens
from rl_training.records.report.sections.own_probes import own_probes
from rl_training.records.report.summary.batch import effective_sample, noise_scale
from rl_training.records.report.summary.changes import entropy_changes
from rl_training.records.report.summary.level_rows import level_rows
from rl_training.records.report.summary.row import Link, Row
from rl_training.records.report.verdict import Verdict, judge
from rl_training.records.report.wording import wording_of
from rl_training.records.table.effects import (
    NO_FALL,
    Effect,
    earned_per_nat,
    effects_of,
    halving,
    keeping,
)
from rl_training.records.table.rates import is_falling
from rl_training.records.table.series import Run
from rl_training.vocabulary import BUILT_IN_NAMES

QUESTIONS = {  # by probe: how the names of its metrics begin, and what it answers
    "simple": ("delta_h", "where the entropy goes"),
    "measured": ("measured", "what each step does to every reward"),
    "gns": ("gns", "whether the batch is too small"),
    "token_classes": ("tokens", "which tokens take entropy"),
    "interventions": ("intervention", "what an entropy bonus or another loss would do"),
}


def summarize(run: Run) -> list[Row]:
    """Return the rows of the summary: reward, entropy and its change, noise scale, interventions, cost."""
    verdict = judge(run)
    rows = [
        *level_rows(run, verdict.story),
        *_further_probes(run),
        *_tokens(run),
        *_interventions(run, verdict),
        *noise_scale(run, verdict),
        *effective_sample(run),
        *entropy_changes(run),
        _cost(run),
    ]
    return [
        row._replace(label=on_one_line(row.label), value=on_one_line(row.value), note=on_one_line(row.note))
        for row in rows
    ]


def _further_probes(run: Run) -> Iterator[Row]:
    """Name the probes that were off, what each would have told, and the setting that turns them on."""
    recorded = {name.partition("/")[0] for name in run.names()}
    absent = {probe: question for probe, (prefix, question) in QUESTIONS.items() if prefix not in recorded}
    if recorded and absent:
        questions = "; ".join(f"{probe}: {question}" for probe, question in absent.items())
        running = [name for name in BUILT_IN_NAMES if (run.table["probe"] == name).any()]
        further = own_probes(run.table)
        probes = wording_of(run).probes(*running, *absent)
        note = f"{questions}; to turn them on, {probes.text}"
        note += f" beside your own: {', '.join(further)}" if further else ""
        yield Row("probes that were off", str(len(absent)), note, settings=probes.settings)


def _tokens(run: Run) -> Iterator[Row]:
    """Yield the row on the token that takes most entropy."""
    heaviest = tokens.heaviest(run)
    if heaviest:
        yield Row("token that surely takes most", *heaviest, Link(tokens.TITLE, f"#{tokens.ANCHOR}"), quotes=True)


def _interventions(run: Run, verdict: Verdict) -> Iterator[Row]:
    """Yield the row on whether an intervention is needed, and on those that keep entropy, with their prices."""
    effects = effects_of(run)
    halve = halving(effects)
    keep = keeping(effects)
    if not effects:
        return
    if still_falls(run, verdict):
        yield Row("interventions", "not certain", f"{STILL_FALLS}: more steps will tell")
    elif is_fine(run, verdict) or verdict.kind.is_undecided:
        listed = "; the page lists what would keep entropy, and its price" if halve or keep else ""
        value = "cannot be told yet" if verdict.kind.is_undecided else "none needed"
        yield Row("interventions", value, verdict.entropy_is_fine + listed)
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
