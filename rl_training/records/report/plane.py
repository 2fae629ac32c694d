"""Interventions plotted by their effect on reward and entropy, relative to the step as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import is_significant
from rl_training.records.report.charts import BLUE, GREY, TEXT, Axis, Chart, Series, draw
from rl_training.records.report.curves import framed
from rl_training.records.report.predictions import scatter
from rl_training.records.report.words import MILLI

PRICES = (1.0, 3.0, 10.0)  # of the lines, in points of reward per thousandth of a nat


@dataclass(frozen=True)
class Effect:
    """What an intervention changes, compared with the step as it is: entropy (nats per token), reward, at a price."""

    name: str
    delta_h: Estimate
    delta_reward: Estimate
    price: Estimate

    @property
    def is_there(self) -> bool:
        values = self.delta_reward.value, self.delta_h.value
        return all(map(math.isfinite, values)) and any(values)

    @property
    def keeps(self) -> bool:
        """Whether it keeps entropy significantly."""
        return is_significant(self.delta_h) and self.delta_h.value > 0

    @property
    def spends(self) -> bool:
        return is_significant(self.delta_h) and self.delta_h.value < 0


Some = TypeVar("Some", bound=Effect)


@dataclass(frozen=True)
class Interventions:
    """What a page says of the interventions of a run."""

    sentences: list[str]
    headings: list[str]
    rows: list[list[str]]
    chart: Chart
    lines: Sequence[str] = ()  # commands that try what is said


def plane(name: str, title: str, caption: str, effects: Sequence[Effect]) -> Chart:
    """Returns the chart: each intervention is a cross of two bars, with its name; the step as it is lies at 0, 0.

    Unknown and exactly zero changes are not drawn.
    """
    shown = sorted((effect for effect in effects if effect.is_there), key=lambda effect: -effect.delta_h.value)
    crosses = [
        replace(scatter(effect.name, BLUE, "circle", [(effect.delta_reward, effect.delta_h)], MILLI), text=effect.name)
        for effect in shown
    ]
    if not crosses:
        return Chart(name, title, "", ["no intervention has a known effect"])
    far = max(
        abs(value) for cross in crosses for value in (*cross.left, *cross.right, *cross.x) if math.isfinite(value)
    )
    prices = [
        Series(f"price {price:g}", GREY, [-far, far], [far / price, -far / price], dash=(2, 3)) for price in PRICES
    ]
    plain = Series("the step as it is", TEXT, [0.0], [0.0], line=False, mark="square")
    y = Axis("difference in entropy, 1e-3 nats per token and step", ends=framed([*crosses, plain]))
    x, rules = Axis("difference in reward, 1e-3 per step"), {"x": [0], "y": [0]}
    return draw(name, title, caption, [], [*prices, *crosses, plain], y, x, rules, height=360)


def in_order_of_price(effects: Sequence[Some]) -> list[Some]:
    """Returns the effects, the cheapest first, those without a price last."""
    return sorted(effects, key=lambda effect: effect.price.value if math.isfinite(effect.price.value) else math.inf)


def certain_order(prices: Mapping[str, Estimate]) -> str:
    """Returns the sentence that says how certain the order of these prices is; "" of fewer than two known ones.

    Two whose 95 % intervals do not overlap differ. What they share of the noise makes that a cautious answer.
    """
    ends = {name: price.ends() for name, price in prices.items() if math.isfinite(price.value)}
    if len(ends) < 2:
        return ""
    dearer = {name: [other for other in ends if ends[other][0] > ends[name][1]] for name in ends}
    pairs = "; ".join(f"{name} costs less than {', '.join(others)}" for name, others in dearer.items() if others)
    if pairs:
        is_whole = 2 * sum(map(len, dearer.values())) == len(ends) * (len(ends) - 1)
        rest = "" if is_whole else " The rest of their order is not certain."
        return f" Prices whose intervals do not overlap: {pairs}.{rest}"
    return " The intervals of these prices all overlap: their order is not certain."
