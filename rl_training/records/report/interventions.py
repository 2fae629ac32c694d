"""The report's section on interventions, as their probe measured them: effect, price, and commands to try them.

Values are the probe's running means at its last measured step, `intervention/NAME/mean_…`, with that step's own beside.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import is_significant
from rl_training.records.folder import checkpoints_of
from rl_training.records.report.charts import BLUE, GREY, TEXT, Chart, Section, Series, draw
from rl_training.records.report.findings import present_rate
from rl_training.records.report.series import Run, finite_numbers, last_of, to_rows
from rl_training.records.report.words import MILLI, in_words, sentences, table

NAMES = re.compile(r"^intervention/(.+)/mean_delta_h$")
PLAIN_NAME = re.compile(r"[\w./:-]+")  # needs no quotes
NO_FALL = "entropy does not fall significantly now"
MOST = 4  # that are tried
PRICES = (1.0, 3.0, 10.0)  # of the lines, in points of reward per thousandth of a nat


@dataclass(frozen=True)
class Effect:
    """What an intervention changes, compared with the step as it is: the probe's running means at its last step."""

    name: str
    delta_h: Estimate  # nats per token
    delta_reward: Estimate
    price: Estimate
    at_last_step: Estimate  # its change of entropy at that step alone
    kept: Estimate  # its change of entropy when it is kept
    halves_at: Estimate  # when it is kept
    steps: int  # measured ones

    @property
    def bare_name(self) -> str:
        """Its name without a strength."""
        return self.name.partition(":")[0]

    @property
    def keeps(self) -> bool:
        """Whether it keeps entropy significantly."""
        return is_significant(self.delta_h) and self.delta_h.value > 0

    @property
    def spends(self) -> bool:
        return is_significant(self.delta_h) and self.delta_h.value < 0

    @property
    def is_known(self) -> bool:
        """Whether both changes are, and not both exactly 0."""
        both = (self.delta_reward.value, self.delta_h.value)
        return all(map(math.isfinite, both)) and any(both)

    @property
    def halves(self) -> bool:
        return math.isfinite(self.halves_at.value)

    @property
    def at_price(self) -> str:
        return f" (price {in_words(self.price)})" if math.isfinite(self.price.value) else ""

    @property
    def strength(self) -> str:
        """The strength with which it halves the fall."""
        return f"{self.halves_at.value:.2g}"


def interventions_of_run(run: Run) -> Section | None:
    """Returns what is said of the interventions that were measured; None where none was."""
    found = _measured(run)
    chosen = preferred(run) if found and checkpoints_of(run.folder) else []
    words = ["rl-training", "try", str(run.folder), f"interventions={as_list(chosen)}"]
    lines = [shlex.join(words)] if chosen else []
    shown = table("intervention_table", effects=found)
    return Section("interventions", _sentences(run, found), shown, [plane(found)], lines) if found else None


def intervention_groups(run: Run) -> dict[str, Any]:
    """Returns the effects in order of price, and those that would halve its fall, keep it and spend it."""
    found = _measured(run)
    halving = {effect.bare_name: effect for effect in reversed(found) if effect.halves}  # one of several strengths
    return {
        "found": found, "falls": is_falling(run), "halving": list(halving.values())[::-1],
        "keeping": [effect for effect in found if effect.keeps],
        "spending": [effect for effect in found if effect.spends],
    }  # fmt: skip


def _measured(run: Run) -> list[Effect]:
    """Returns the interventions at the last step at which they were measured, the cheapest first."""
    effects, falls = [], is_falling(run)
    quantities = ("mean_delta_h", "mean_delta_reward", "mean_price", "delta_h", "mean_delta_h_kept", "kept_halves_at")
    for name in (match.group(1) for match in map(NAMES.match, run.names()) if match):
        delta_h, delta_reward, price, last, kept, halves_at = (
            run.last(f"intervention/{name}/{quantity}") or Estimate.missing("it was not recorded")
            for quantity in quantities
        )
        if math.isfinite(halves_at.value) and not falls:
            halves_at = Estimate.missing(NO_FALL)
        steps = run.measured_steps(f"intervention/{name}/mean_delta_h")
        effects.append(Effect(name, delta_h, delta_reward, price, last, kept, halves_at, steps))
    return sorted(effects, key=lambda effect: effect.price.value if math.isfinite(effect.price.value) else math.inf)


def is_falling(run: Run) -> bool:
    """Returns whether entropy falls significantly now, by `forward`; where that was not measured, by the mean step."""
    fall = present_rate(run) or last_of(run.known("intervention/plain_mean_delta_h"))
    return fall is not None and is_significant(fall) and fall.value < 0


def _sentences(run: Run, found: Sequence[Effect]) -> list[str]:
    latest = run.known("intervention/plain_delta_h")
    unclear = [effect for effect in found if effect.delta_h.half_width() > 0 and not is_significant(effect.delta_h)]
    return sentences(
        "interventions",
        fall=last_of(run.known("intervention/plain_mean_delta_h")),
        gain=last_of(run.known("intervention/plain_mean_delta_reward")),
        latest=last_of(latest),
        at=max(latest.index, default=0),
        unclear=[(effect, *_needed(run, effect)) for effect in unclear],
        order=certain_order,
        **intervention_groups(run),
    )


def certain_order(effects: Sequence[Effect], name: str) -> str:
    """Returns the sentence that says how certain the order of their prices is; "" of fewer than two known ones.

    Two whose 95 % intervals do not overlap differ. What they share of the noise makes that a cautious answer.
    """
    ends = {getattr(effect, name): effect.price.ends() for effect in effects if math.isfinite(effect.price.value)}
    if len(ends) < 2:
        return ""
    dearer = {name: [other for other in ends if ends[other][0] > ends[name][1]] for name in ends}
    pairs = "; ".join(f"{name} costs less than {', '.join(others)}" for name, others in dearer.items() if others)
    is_whole = 2 * sum(map(len, dearer.values())) == len(ends) * (len(ends) - 1)
    return sentences("order", pairs=pairs, is_whole=is_whole)[0]


def _needed(run: Run, effect: Effect) -> tuple[int | None, float]:
    """Returns how many more measured steps would make its present value significant, and the most that count.

    None where more would be needed than the mean remembers.
    """
    settings = run.probe("interventions")
    decay = settings.get("decay", 0.9) ** settings.get("every", 1)  # from a measured step to the next
    most = (1 + decay) / (1 - decay) if decay < 1 else math.inf  # effective number of steps in the mean, at most
    times = (effect.delta_h.half_width() / effect.delta_h.value) ** 2 if effect.delta_h.value else math.inf
    needed = max(effect.steps, 1) * times
    return (None if needed > most else max(1, math.ceil(needed - effect.steps))), most


def preferred(run: Run) -> list[str]:
    """Returns what `intervention` can be to halve the fall or keep entropy, the cheapest MOST; none without a fall."""
    chosen = [_setting(run, effect) for effect in _measured(run) if effect.halves or effect.keeps]
    return list(dict.fromkeys(chosen))[:MOST] if is_falling(run) else []


def _setting(run: Run, effect: Effect) -> str:
    """Returns what `intervention` must be: the strength that halves the fall, else its own; with its file or module."""
    names = map(str, run.probe("interventions").get("which") or [])
    text = next((name for name in names if name.endswith(f":{effect.name}")), effect.name)
    if effect.halves:
        return f"{text.removesuffix(effect.name)}{effect.bare_name}:{effect.strength}"
    return text


def as_list(names: Sequence[str]) -> str:
    """Returns names as Hydra reads a list.

    >>> as_list(["lr:0.5", "mis:0.5,2"])
    '[lr:0.5,"mis:0.5,2"]'
    """
    return f"[{','.join(name if PLAIN_NAME.fullmatch(name) else json.dumps(name) for name in names)}]"


def plane(effects: Sequence[Effect]) -> Chart:
    """Returns the chart: each intervention is a cross of two bars, with its name; the step as it is lies at 0, 0.

    Unknown and exactly zero changes are not drawn.
    """
    shown = [effect for effect in sorted(effects, key=lambda effect: -effect.delta_h.value) if effect.is_known]
    if not shown:
        return draw("interventions", [], ["no intervention has a known effect"])
    rewards, entropies = (
        to_rows(dict(enumerate(getattr(effect, name) for effect in shown))) for name in ("delta_reward", "delta_h")
    )
    reach, heights = (MILLI * finite_numbers(rows[["value", "low", "high"]]) for rows in (rewards, entropies))
    low, high, far = min(heights.min(), 0.0), max(heights.max(), 0.0), reach.abs().max()
    room = 0.03 * (high - low) or 0.5
    series = [
        *(Series(f"price {at:g}", GREY, [-far, far], [far / at, -far / at], dash=(2, 3)) for at in PRICES),
        *(
            Series.cloud(effect.name, BLUE, "circle", rewards.loc[[row]], entropies.loc[[row]], MILLI, text=effect.name)
            for row, effect in enumerate(shown)
        ),
        Series.cloud("the step as it is", TEXT, "square", [0.0], [0.0]),
    ]
    return draw("interventions", series, ends=(low - room, high + room))
