"""The report's section on interventions: their effects and prices, as the probe measured them.

Values are the probe's running means (`intervention/NAME/mean_…`) at the last measured step, and that step's own effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_training.records.report.charts import BLUE, GREY, ORANGE, TEXT, Chart, Section, Series, draw
from rl_training.records.report.labels import label_offsets, side
from rl_training.records.report.rates import entropy_now, is_falling
from rl_training.records.report.series import Run, last_of, once_per_run, to_rows
from rl_training.records.report.trends import times
from rl_training.records.report.verdict import NOTHING_TO_DO, RISES, STEADY, UNKNOWN, judge
from rl_training.records.report.writing import MILLI, MISSING, format_estimate, milli, non_empty_lines, on_one_line
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

NAMES = re.compile(r"^intervention/(.+)/mean_delta_h$")
# Metrics of an intervention, in the order of the fields of Effect.
QUANTITIES = ("mean_delta_h", "mean_delta_reward", "mean_price", "delta_h", "mean_delta_h_kept", "kept_halves_at")
HEADINGS = [
    "intervention", "halves the fall", "price", "entropy, one step", "when kept", "last step alone", "reward, one step",
    "note",
]  # fmt: skip
CAVEAT = (
    "All of this is predicted from single steps, and extrapolated linearly for “when kept”. Ten real steps agreed with "
    "the order in part, and not with the sizes; an effect that grows with distance (KL) is missed. Try them, and "
    "compare."
)
NO_FALL = "entropy does not fall significantly now"
NO_EFFECT = "the interval of its effect in one step includes 0"
STILL_FALLS = "the curve of entropy does not fall in the last quarter of the run, but single steps lower it"
PLANE_HEIGHT = 360  # pixels, the same as in charts.yaml
PRICES = (1.0, 3.0, 10.0)  # of the dotted lines: thousandths of reward per thousandth of a nat


@dataclass(frozen=True)
class Effect:
    """What an intervention changes relative to the plain step: the probe's running means at its last step."""

    name: str
    delta_h: Estimate  # nats per token
    delta_reward: Estimate
    price: Estimate
    at_last_step: Estimate  # change of entropy at the last measured step alone
    kept: Estimate  # change of entropy if the intervention is kept
    halves_at: Estimate  # strength that halves the fall if the intervention is kept
    steps: int  # number of measured steps
    strength: float = math.nan  # if the name does not say it; nan: it does, or there is none

    @property
    def label(self) -> str:
        """The name with the strength, as in the setting."""
        return self.name if math.isnan(self.strength) else f"{self.name}:{self.strength:g}"

    @property
    def bare_name(self) -> str:
        """The name without a strength."""
        return self.name.partition(":")[0]


def interventions_of_run(run: Run, commands: Sequence[str] = ()) -> Section | None:
    """Return the section on the measured interventions, with commands that train with them; None if there are none."""
    effects = effects_of(run)
    if not effects:
        return None
    kind, steps = judge(run).kind, max(effect.steps for effect in effects)
    said = non_empty_lines(
        _whether_needed(run, kind),
        _fall(run, steps),
        _halving(effects),
        _keeping(effects),
        _yardstick(run),
        _spending(effects),
        _undecided(run, effects),
        CAVEAT,
    )
    drawn = plane(effects, earned_per_nat(run))
    return Section("interventions", said, [HEADINGS, *map(_cells, effects)], [drawn], commands)


@once_per_run
def effects_of(run: Run) -> list[Effect]:
    """Return the effect of each intervention at the last step that measured it.

    Interventions that keep entropy significantly come first, those that spend significantly more come last; each group
    is sorted by price.
    """
    effects, falls = [], is_falling(run)
    for name in (match[1] for match in map(NAMES.match, run.names()) if match):
        metrics = [f"intervention/{name}/{quantity}" for quantity in QUANTITIES]
        delta_h, delta_reward, price, at_last_step, kept, halves_at = (
            last_of(run.rows(metric)) or Estimate.missing("it was not recorded") for metric in metrics
        )
        if math.isfinite(halves_at.value) and not falls:
            halves_at = Estimate.missing(NO_FALL)
        elif math.isfinite(halves_at.value) and not is_significant(delta_h):
            halves_at = Estimate.missing(NO_EFFECT)
        steps, strength = run.measured_steps(metrics[0]), run.rows(metrics[0])["strength"].dropna().tolist()[-1:]
        numbers = delta_h, delta_reward, price, at_last_step, kept, halves_at
        effects.append(Effect(name, *numbers, steps, *strength))
    return sorted(effects, key=_place)


def _place(effect: Effect) -> tuple[int, bool, float]:
    low, high = effect.delta_h.bounds()
    return 0 if low > 0 else 2 if high < 0 else 1, math.isnan(effect.price.value), effect.price.value


def halving(effects: Sequence[Effect]) -> list[Effect]:
    """Return the effects with a strength that halves the fall, the first of each intervention."""
    by_name = {effect.bare_name: effect for effect in reversed(effects) if not math.isnan(effect.halves_at.value)}
    return [effect for effect in effects if by_name.get(effect.bare_name) is effect]


def keeping(effects: Sequence[Effect]) -> list[Effect]:
    """Return the effects that significantly keep entropy at their own strength."""
    return [effect for effect in effects if effect.delta_h.bounds()[0] > 0]


# --- in sentences -----------------------------------------------------------------------------------------------------


def still_falls(run: Run, kind: str) -> bool:
    """Return whether single steps lower an entropy that, by the verdict, does not fall."""
    return kind in (STEADY, RISES) and is_falling(run)


def _whether_needed(run: Run, kind: str) -> str:
    if kind not in NOTHING_TO_DO:
        return ""
    if still_falls(run, kind):
        return f"Whether one is needed is not certain: {STILL_FALLS}. More steps will tell."
    return f"None is needed{' yet' if kind == UNKNOWN else ''}: {NOTHING_TO_DO[kind]}."


def _fall(run: Run, steps: int) -> str:
    """Say how fast entropy falls now, and what effects are measured against: the mean over `steps` measured steps."""
    fall, gain, latest = (run.last(f"intervention/plain_{q}") for q in ("mean_delta_h", "mean_delta_reward", "delta_h"))
    if fall is None:
        return "How fast entropy falls is not known here."
    now, since, source = entropy_now(run)
    said = f"Now, in steps {since} to {run.steps[-1]}, a step changes entropy by {milli(now)} thousandths of a nat"
    said = f"{said} ({source})" if math.isfinite(now.value) else "How entropy changes now is not known"
    said += "." if is_falling(run) else f": {NO_FALL}, and there is nothing to halve."
    at = run.finite_rows("intervention/plain_mean_delta_h").index.max()
    said += f" Effects are differences from the mean step, {milli(fall)} of entropy"
    said += f" and {milli(gain)} of reward" if gain else ""
    said += f": over the measured steps up to step {at} ({steps}), of which the latest count most"
    return f"{said}; step {at} alone has {milli(latest)}." if latest else f"{said}."


def _halving(effects: Sequence[Effect]) -> str:
    chosen = halving(effects)
    strengths = "; ".join(f"{e.bare_name} {e.halves_at.value:.2g}{_at_price(e)}" for e in chosen)
    order = certain_order(chosen, "bare_name")
    what = "By one step, extrapolated, these strengths would halve its fall once the momentum has adapted"
    return f"{what}, in order of price: {strengths}. {order}" if chosen else ""


def _keeping(effects: Sequence[Effect]) -> str:
    chosen = keeping(effects)
    how = "as set, per step, in order of price, in thousandths of a nat"
    order = certain_order(chosen, "name")
    return f"Keeps entropy significantly (95 %) {how}: {_with_prices(chosen)}. {order}" if chosen else ""


def earned_per_nat(run: Run) -> float:
    """Return the reward that plain steps earn per nat of entropy that they spend, the yardstick of prices.

    nan unless both are significant: their ratio could be anything.
    """
    fall, gain = (run.last(f"intervention/plain_{quantity}") for quantity in ("mean_delta_h", "mean_delta_reward"))
    if fall is None or gain is None or not (fall.bounds()[1] < 0 and gain.bounds()[0] > 0):
        return math.nan
    return -gain.value / fall.value


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
            steps, most = _needed(run, effect)
            why = f"too small an effect for a mean that remembers {most:.0f} measured steps"
            parts.append(f"{effect.name} ({why if steps is None else f'needs about {steps} more measured steps'})")
    return f"No significant effect on entropy: {'; '.join(parts)}." if parts else ""


def _with_prices(effects: Sequence[Effect]) -> str:
    return "; ".join(f"{effect.name} {milli(effect.delta_h)}{_at_price(effect)}" for effect in effects)


def _at_price(effect: Effect) -> str:
    return "" if math.isnan(effect.price.value) else f" (price {format_estimate(effect.price)})"


def certain_order(effects: Sequence[Effect], name: str) -> str:
    """Return the sentence on how certain the order of the prices is; "" if fewer than two prices are known.

    Two prices differ if their 95 % intervals do not overlap. This is cautious, because they share part of their noise.
    """
    ends = {getattr(effect, name): effect.price.bounds() for effect in effects if math.isfinite(effect.price.value)}
    if len(ends) < 2:
        return ""
    dearer = {name: [other for other in ends if ends[other][0] > ends[name][1]] for name in ends}
    pairs = "; ".join(f"{name} costs less than {', '.join(others)}" for name, others in dearer.items() if others)
    if not pairs:
        return "The intervals of these prices all overlap: their order is not certain."
    is_whole = 2 * sum(map(len, dearer.values())) == len(ends) * (len(ends) - 1)
    rest = "" if is_whole else " The rest of their order is not certain."
    return f"Prices whose intervals do not overlap: {pairs}.{rest}"


def _needed(run: Run, effect: Effect) -> tuple[int | None, float]:
    """Return how many more measured steps would make the present effect significant, and how many the mean can hold.

    The first is None if more would be needed than the mean remembers.
    """
    settings = {"decay": 0.9, "every": 1} | run.probe("interventions")
    is_known = all(isinstance(settings[key], int | float) for key in ("decay", "every")) and 0 <= settings["decay"] < 1
    decay = settings["decay"] ** settings["every"] if is_known else 1.0  # between two measured steps
    most = (1 + decay) / (1 - decay) if decay < 1 else math.inf  # largest effective number of steps in the mean
    times = (effect.delta_h.half_width() / effect.delta_h.value) ** 2 if effect.delta_h.value else math.inf
    needed = max(effect.steps, 1) * times
    return (None if needed > most else max(1, math.ceil(needed - effect.steps))), most


# --- as a table and a chart -------------------------------------------------------------------------------------------


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


def plane(effects: Sequence[Effect], earned: float = math.nan) -> Chart:
    """Return the chart of effects as they act when kept: each intervention is a labelled cross of error bars.

    The plain step lies at (0, 0). Unknown changes and changes of exactly zero are not drawn.

    Args:
        effects: The interventions.
        earned: Reward that plain steps earn per nat, drawn as a line; nan if unknown.
    """
    ordered = sorted(effects, key=lambda effect: -effect.delta_h.value)
    rewards, entropies = (
        to_rows({effect.label: change(effect) for effect in ordered}) for change in (_kept_reward, _kept_entropy)
    )
    changes = rewards["value"].abs() + entropies["value"].abs()
    rewards, entropies = (rows[np.isfinite(changes) & (changes > 0)] for rows in (rewards, entropies))
    if rewards.empty:
        return draw("interventions", [], ["no intervention has a known effect"], has_yardstick=False)
    reach, heights = (
        MILLI * rows[["value", "low", "high"]].where(np.isfinite).stack() for rows in (rewards, entropies)
    )
    low, high = min(float(np.nanmin(heights)), 0.0), max(float(np.nanmax(heights)), 0.0)
    far = float(np.nanmax(np.abs(reach)))
    room = 0.03 * (high - low) or 0.5
    ends = low - room, high + room
    places = {
        str(name): (0.5 + 0.5 * MILLI * rewards["value"][name] / far if far > 0 else 0.5,
                    (ends[1] - MILLI * entropies["value"][name]) / (ends[1] - ends[0]))
        for name in rewards.index
    }  # fmt: skip
    offsets = label_offsets(places, PLANE_HEIGHT)
    prices: dict[str, tuple[float, str, tuple[int, ...]]] = {f"price {at:g}": (at, GREY, (2, 3)) for at in PRICES}
    if earned > 0:
        prices[f"plain steps earn {earned:.2g} per nat"] = (earned, ORANGE, ())
    series = [
        *(Series(name, color, [-far, far], [far / at, -far / at], dash=dash)
          for name, (at, color, dash) in prices.items()),
        *(
            Series.cloud(name, BLUE, "circle", rewards.loc[[name]], entropies.loc[[name]], MILLI, text=name,
                         text_offset=offsets[name], text_side=side(places[name][0]))
            for name in rewards.index
        ),
        Series.cloud("the step as it is", TEXT, "square", [0.0], [0.0]),
    ]  # fmt: skip
    return draw("interventions", series, ends=ends, has_yardstick=earned > 0)


def _kept_entropy(effect: Effect) -> Estimate:
    """Return the change of entropy when kept; that of one step where the factor between the two is unknown."""
    return effect.delta_h if math.isnan(effect.kept.value) else effect.kept


def _kept_reward(effect: Effect) -> Estimate:
    """Return the change of reward when kept: reward is linear in the step, as entropy is, and has the same factor."""
    factor = effect.kept.value / effect.delta_h.value if effect.delta_h.value else math.nan
    return effect.delta_reward if math.isnan(factor) else times(effect.delta_reward, factor)
