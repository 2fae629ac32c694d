"""Interventions plotted by their effect on reward and entropy, relative to the step as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import is_significant
from rl_training.records.report.drawing import BLACK, BLUE, GREY, Picture, picture
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
    picture: Picture
    lines: Sequence[str] = ()  # commands that try what is said


def plane(file: str, title: str, caption: str, effects: Sequence[Effect]) -> Picture:
    """Returns the picture: each intervention is a cross of two bars; the step as it is lies at 0, 0.

    Names are listed at the side, ordered by ΔH. Unknown and exactly zero changes are not drawn.
    """
    shown = sorted((effect for effect in effects if effect.is_there), key=lambda effect: -effect.delta_h.value)

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1)
        axes.axvline(0, color=GREY, lw=1)
        handles = [axes.plot([0], [0], "s", color=BLACK, ms=7, label="the step as it is")[0]]
        for effect in shown:
            x, y = effect.delta_reward, effect.delta_h
            axes.errorbar(
                MILLI * x.value, MILLI * y.value, MILLI * (y.ends()[1] - y.value), MILLI * (x.ends()[1] - x.value),
                fmt="o", color=BLUE, ms=6, mew=1.5, elinewidth=0.8, label=f"{effect.name}, predicted",
            )  # fmt: skip
        handles.append(Line2D([], [], ls="", marker="o", color=BLUE, mew=1.5, label="predicted"))
        axes.set_xlabel("difference in reward, 1e-3 per step")
        axes.set_ylabel("difference in entropy,\n1e-3 nats per token and step")
        handles.append(_draw_prices(axes))
        _name_at_the_side(axes, shown)
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), columnspacing=1.2)

    why = [] if shown else ["no intervention has a known effect"]
    return picture(file, title, caption, why, draw if shown else None, height=5.5, over_steps=False)


def _draw_prices(axes: Axes) -> Line2D:
    """Draws lines of equal price through the origin, and keeps the frame; returns one for a legend."""
    frame = axes.get_xlim(), axes.get_ylim()
    for price in PRICES:
        axes.axline((0, 0), slope=-1.0 / price, color=GREY, lw=0.8, ls=":", zorder=0)
    axes.set(xlim=frame[0], ylim=frame[1])
    return Line2D([], [], ls=":", color=GREY, lw=0.8, label=f"price {', '.join(f'{price:g}' for price in PRICES)}")


def _name_at_the_side(axes: Axes, order: Sequence[Effect]) -> None:
    low, high = axes.get_ylim()
    right = axes.get_xlim()[1]
    for of, place in zip(order, np.linspace(high, low, len(order) + 2)[1:-1], strict=True):
        axes.annotate(
            of.name.replace("$", r"\$"), (MILLI * of.delta_reward.value, MILLI * of.delta_h.value), (right, place),
            textcoords="data", fontsize=10, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.5, "shrinkA": 1, "shrinkB": 3},
        )  # fmt: skip


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
