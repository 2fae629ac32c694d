"""The report's section on interventions: sentences, a table and the commands that try them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rl_training.records.pages.charts import Section
from rl_training.records.pages.writing import MISSING, format_estimate, milli, non_empty_lines, on_one_line
from rl_training.records.report.interventions.plane import plane
from rl_training.records.report.verdict import Verdict, judge
from rl_training.records.table.effects import (
    NO_FALL,
    Effect,
    earned_per_nat,
    effects_of,
    halving,
    keeping,
)
from rl_training.records.table.estimates import last_of
from rl_training.records.table.rates import entropy_now, is_falling
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

HEADINGS = [
    "intervention", "halves the fall", "price", "entropy, one step", "when kept", "last step alone", "reward, one step",
    "note",
]  # fmt: skip
CAVEAT = (
    "All of this is predicted from single steps, and extrapolated linearly for “when kept”. Ten real steps agreed with "
    "the order in part, and not with the sizes; an effect that grows with distance (KL) is missed."
)
DEFAULTS = {"decay": 0.9, "every": 10}  # of the probe, if its settings are not recorded
TRY = "Try them, and compare:"
PLAIN = "the step as it is"  # the row that others are compared with
STILL_FALLS = "the curve of entropy does not fall in the last quarter of the run, but single steps lower it"


def interventions_of_run(run: Run, commands: Sequence[str] = ()) -> Section | None:
    """Return the section on the measured interventions; None if there are none.

    Args:
        commands: Train with them. They are left out of a section that says that none is needed.
    """
    effects = effects_of(run)
    if not effects:
        return None
    verdict = judge(run)
    steps = max(effect.steps for effect in effects)
    commands = () if is_fine(run, verdict) else commands
    sentences = non_empty_lines(
        _whether_needed(run, verdict),
        _plain_step(run, steps),
        _halving(effects),
        _keeping(effects),
        _yardstick(run),
        _spending(effects),
        _undecided(run, effects),
        CAVEAT,
        TRY if commands else "",
    )
    table = [HEADINGS, _plain_cells(run), *map(_cells, effects)]
    return Section("interventions", sentences, table, [plane(effects, earned_per_nat(run))], commands)


def is_fine(run: Run, verdict: Verdict) -> bool:
    """Return whether nothing need be done to keep entropy, by the verdict and by single steps."""
    return bool(verdict.entropy_is_fine) and not verdict.kind.is_undecided and not still_falls(run, verdict)


def still_falls(run: Run, verdict: Verdict) -> bool:
    """Return whether single steps lower an entropy that, by the verdict, does not fall."""
    return verdict.kind.says_no_fall and is_falling(run)


def _whether_needed(run: Run, verdict: Verdict) -> str:
    if is_fine(run, verdict):
        return f"None is needed: {verdict.entropy_is_fine}. What each would do:"
    if still_falls(run, verdict):
        return f"Whether one is needed is not certain: {STILL_FALLS}. More steps will tell."
    if verdict.kind.is_undecided:
        return f"Whether one is needed cannot be told yet: {verdict.entropy_is_fine}."
    return ""


def _plain_step(run: Run, steps: int) -> str:
    """Say what effects are measured against, the mean over `steps` measured steps, and whether entropy falls now."""
    fall = run.last("intervention/plain_mean_delta_h")
    gain = run.last("intervention/plain_mean_delta_reward")
    if fall is None:
        return "What the step as it is does to entropy is not known here."
    last = run.finite_rows("intervention/plain_mean_delta_h").index.max()
    sentence = f"The step as it is changes entropy by {milli(fall)} thousandths of a nat"
    sentence += f" and reward by {milli(gain)} thousandths" if gain else ""
    sentence += f": the mean over the measured steps up to step {last} ({steps}), of which the latest count most."
    if is_falling(run):
        return f"{sentence} Effects are differences from it."
    now, since, source = entropy_now(run)
    by = f" (by {milli(now)} a step in steps {since} to {run.steps[-1]}, {source})" if math.isfinite(now.value) else ""
    return f"{sentence} Effects are differences from it. But {NO_FALL}{by}, and there is nothing to halve."


def _halving(effects: Sequence[Effect]) -> str:
    with_strength = halving(effects)
    if not with_strength:
        return ""
    strengths = "; ".join(f"{e.bare_name} {e.halves_at.value:.2g}{_at_price(e)}" for e in with_strength)
    order = certain_order({effect.bare_name: effect.price for effect in with_strength})
    return (
        "By one step, extrapolated, these strengths would halve entropy's fall once the momentum has adapted, in order "
        f"of price: {strengths}. {order}"
    )


def _keeping(effects: Sequence[Effect]) -> str:
    keepers = keeping(effects)
    if not keepers:
        return ""
    order = certain_order({effect.name: effect.price for effect in keepers})
    return (
        "Keeps entropy significantly (95 %) as set, per step, in order of price, in thousandths of a nat: "
        f"{_with_prices(keepers)}. {order}"
    )


def _yardstick(run: Run) -> str:
    earned = earned_per_nat(run)
    if math.isnan(earned):
        return ""
    return (
        f"The yardstick: plain steps earn {earned:.2g} of reward per nat that they spend. What has a lower price keeps "
        "a nat for less."
    )


def _spending(effects: Sequence[Effect]) -> str:
    spenders = [effect for effect in effects if effect.delta_h.bounds()[1] < 0]
    return f"Spends significantly more entropy, in thousandths of a nat: {_with_prices(spenders)}." if spenders else ""


def _undecided(run: Run, effects: Sequence[Effect]) -> str:
    parts = []
    for effect in effects:
        if effect.delta_h.half_width() > 0 and not is_significant(effect.delta_h):
            (steps, most) = _further_steps(run, effect)
            remark = f"needs about {steps} more measured steps"
            if steps is None:
                remark = f"too small an effect for a mean that remembers {most:.0f} measured steps"
            parts.append(f"{effect.name} ({remark})")
    return f"No significant effect on entropy: {'; '.join(parts)}." if parts else ""


def _with_prices(effects: Sequence[Effect]) -> str:
    return "; ".join(f"{effect.name} {milli(effect.delta_h)}{_at_price(effect)}" for effect in effects)


def _at_price(effect: Effect) -> str:
    return "" if math.isnan(effect.price.value) else f" (price {format_estimate(effect.price)})"


def certain_order(prices: Mapping[str, Estimate]) -> str:
    """Return the sentence on how certain the order of the prices is; "" if fewer than two prices are known.

    Two prices differ if their 95 % intervals do not overlap. This is cautious, because they share part of their noise.
    """
    ends = {name: price.bounds() for name, price in prices.items() if math.isfinite(price.value)}
    if len(ends) < 2:
        return ""
    dearer = {name: [other for other in ends if ends[other][0] > ends[name][1]] for name in ends}
    pairs = "; ".join(f"{name} costs less than {', '.join(others)}" for name, others in dearer.items() if others)
    if not pairs:
        return "The intervals of these prices all overlap: their order is not certain."
    is_whole = 2 * sum(map(len, dearer.values())) == len(ends) * (len(ends) - 1)
    remark = "" if is_whole else " The rest of their order is not certain."
    return f"Prices whose intervals do not overlap: {pairs}.{remark}"


def _further_steps(run: Run, effect: Effect) -> tuple[int | None, float]:
    """Return how many more measured steps would make the present effect significant, and how many the mean can hold.

    The first is None if more would be needed than the mean remembers.
    """
    settings = DEFAULTS | run.probe("interventions")
    is_known = all(isinstance(settings[key], int | float) for key in ("decay", "every")) and 0 <= settings["decay"] < 1
    decay = settings["decay"] ** settings["every"] if is_known else 1.0  # between two measured steps
    most = (1 + decay) / (1 - decay) if decay < 1 else math.inf  # largest effective number of steps in the mean
    times = (effect.delta_h.half_width() / effect.delta_h.value) ** 2 if effect.delta_h.value else math.inf
    needed = max(effect.steps, 1) * times
    return (None if needed > most else max(1, math.ceil(needed - effect.steps))), most


def _plain_cells(run: Run) -> list[str]:
    """Return the table row of the step that interventions are compared with, under HEADINGS."""
    fall = last_of(run.rows("intervention/plain_mean_delta_h"))
    gain = last_of(run.rows("intervention/plain_mean_delta_reward"))
    latest = last_of(run.rows("intervention/plain_delta_h"))
    reason = on_one_line(fall.reason) if fall else ""
    return [PLAIN, MISSING, MISSING, milli(fall), MISSING, milli(latest), milli(gain), reason]


def _cells(effect: Effect) -> list[str]:
    """Return an intervention's table row, under HEADINGS."""
    unknown = math.isnan(effect.halves_at.value)
    reasons = dict.fromkeys([effect.delta_h.reason, effect.halves_at.reason if unknown else ""])
    cells = [
        effect.label,
        MISSING if unknown else f"{effect.halves_at.value:.2g}",
        format_estimate(effect.price),
        *map(milli, (effect.delta_h, effect.kept, effect.at_last_step, effect.delta_reward)),
        "; ".join(filter(None, reasons)),
    ]
    return list(map(on_one_line, cells))
