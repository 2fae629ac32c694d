"""Interventions plotted by their effect on reward and entropy, relative to the step as it is; and in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import is_significant
from rl_training.records.report.drawing import BLACK, BLUE, GREY, ORANGE, Picture, picture
from rl_training.records.report.series import MILLI
from rl_training.records.report.summary import MISSING, milli
from rl_training.records.report.summary import in_words as estimate_in_words

PLAIN = "plain"
PRICES = (1.0, 3.0, 10.0)  # of the lines, in points of reward per thousandth of a nat
ONE_STEP = (
    "How each intervention would change the next step, relative to the step as it is (the square): left gives up "
    "reward, up keeps entropy. All points on a dotted line have the same price; flatter lines are dearer. "
    "Predicted from gradients alone, and measured, on the same sequences."
)
SEVERAL_STEPS = (
    "That many real steps with each intervention, compared with as many without: same prompts, common random numbers, "
    "measured on fresh responses."
)


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
    """What a page says of the interventions at one checkpoint, at one step or after several."""

    sentences: list[str]
    headings: list[str]
    rows: list[list[str]]
    picture: Picture
    lines: Sequence[str] = ()  # commands that try what is said


def plane(
    file: str, title: str, caption: str, predicted: Sequence[Effect], measured: Sequence[Effect], per: str = "step"
) -> Picture:
    """Returns the picture: each intervention is a cross of two bars (predicted filled, measured open); plain is 0, 0.

    Names are listed at the side, ordered by ΔH. Unknown and exactly zero changes are not drawn.
    """
    shown = {of.name: of for of in (*predicted, *measured) if of.is_there}  # the measured one's name, last
    order = sorted(shown.values(), key=lambda of: -of.delta_h.value)

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1)
        axes.axvline(0, color=GREY, lw=1)
        handles = [axes.plot([0], [0], "s", color=BLACK, ms=7, label="the step as it is")[0]]
        for effects, color, face, kind in (
            (predicted, BLUE, BLUE, "predicted"), (measured, ORANGE, "white", "measured"),
        ):  # fmt: skip
            if not effects:
                continue
            for of in (of for of in effects if of.is_there):
                x, y = of.delta_reward, of.delta_h
                axes.errorbar(
                    MILLI * x.value, MILLI * y.value, MILLI * (y.ends()[1] - y.value), MILLI * (x.ends()[1] - x.value),
                    fmt="o", color=color, mfc=face, ms=6, mew=1.5, elinewidth=0.8, label=f"{of.name}, {kind}",
                )  # fmt: skip
            handles.append(Line2D([], [], ls="", marker="o", color=color, mfc=face, mew=1.5, label=kind))
        axes.set_xlabel(f"difference in reward, 1e-3 per {per}")
        axes.set_ylabel(f"difference in entropy,\n1e-3 nats per token and {per}")
        handles.append(_draw_prices(axes))
        _name_at_the_side(axes, order)
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), columnspacing=1.2)

    why = [] if order else ["no intervention has a known effect"]
    return picture(file, title, caption, why, draw if order else None, height=5.5, over_steps=False)


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


def interventions_of(content: Mapping[str, Any], name: str) -> Iterator[Interventions]:
    """Yields what a page says of the interventions in a result.json: at one step, and after several."""
    step, tables = content["step"] + 1, content["tables"]
    for key, kinds in (("interventions", ("predicted", "measured")), ("branches", ("measured",))):
        rows = tables.get(key)
        if not rows:
            continue
        steps = rows[0].get("steps", 1)
        per = "1 step" if steps == 1 else f"{steps} steps"
        title, caption = f"Offline {name}: {per} with each intervention, from step {step} on", SEVERAL_STEPS
        if key == "interventions":
            title, caption, per = f"Offline {name}: interventions at step {step}", ONE_STEP, "step"
        caption += f" Means over {max(row['updates'] for row in rows)} U, 95 % intervals."
        predicted = effects_of(rows, "predicted") if "predicted" in kinds else []
        file = f"offline_{name}_{key}_{step}.png"
        drawn = plane(file, title, caption, predicted, effects_of(rows, "measured"), per)
        numbers = (f"{what}, {kind}" for what in ("entropy", "reward") for kind in kinds)
        headings = ["intervention", *numbers, "price", "note"]
        yield Interventions(in_words(rows, content["checkpoint"]), headings, table_of(rows, kinds), drawn)


def effects_of(rows: Sequence[Mapping[str, Any]], kind: str) -> list[Effect]:
    """Returns the effects in a table of result.json, `kind` predicted or measured, without that of the plain step."""
    return [
        Effect(row["name"], _estimate(row, f"{kind}_delta_h"), _estimate(row, f"{kind}_delta_reward"), _price(row))
        for row in rows
        if row["name"] != PLAIN
    ]


def _estimate(row: Mapping[str, Any], key: str) -> Estimate:
    value, half = row[key], row[f"{key}_half"]
    return Estimate(value, reason=row["remark"] or "its error is not known", interval=(value - half, value + half))


def _price(row: Mapping[str, Any]) -> Estimate:
    """Returns its measured price with Fieller's interval."""
    price, low, high = (row[f"measured_price{end}"] for end in ("", "_low", "_high"))
    if math.isnan(price):
        return Estimate.missing("no reward in E changed")
    interval = None if math.isnan(low) or math.isnan(high) else (low, high)
    return Estimate(price + 0.0, reason="its interval is not symmetric", interval=interval)


def in_words(rows: Sequence[Mapping[str, Any]], checkpoint: str = "") -> list[str]:
    """Returns sentences to act on: which interventions significantly keep entropy, at what price, and which do not.

    rows        of a table with what was measured of each intervention
    checkpoint  where the command that trains with the cheapest would start
    """
    effects = effects_of(rows, "measured")
    keeps = in_order_of_price([of for of in effects if of.keeps])
    spends = sorted((of for of in effects if of.spends), key=lambda of: of.delta_h.value)
    missing = [of for of in effects if math.isnan(of.delta_h.value)]
    nothing = [of for of in effects if of.delta_h.value == of.delta_reward.value == 0]
    untold = [of for of in effects if of not in (*keeps, *spends, *missing, *nothing)]
    said = [
        ("Significantly more entropy than the step as it is (95 %), in order of price", map(_priced, keeps)),
        ("Significantly less entropy", (f"{of.name} {milli(of.delta_h)}" for of in spends)),
        ("No significant effect on entropy (more U would help: sweep.update_seeds)", (of.name for of in untold)),
        ("Exactly no effect here", (of.name for of in nothing)),
        ("Not available", (f"{of.name} ({of.delta_h.reason})" for of in missing)),
    ]
    sentences = [f"{words}: {told}." for words, names in said if (told := "; ".join(names))]
    if keeps:
        sentences[0] += certain_order({of.name: of.price for of in keeps})
    if keeps and checkpoint:
        asked = next(row["asked"] for row in rows if row["name"] == keeps[0].name)
        branch = f"rl-training train branch={checkpoint} run_dir=NEW intervention={asked}"
        sentences.append(f"To train with the first of them from here: {branch}")
    return sentences


def _priced(of: Effect) -> str:
    if math.isnan(of.price.value):
        return f"{of.name} {milli(of.delta_h)} (price not measured: {of.price.reason})"
    return f"{of.name} {milli(of.delta_h)} at a price of {estimate_in_words(of.price)}"


def in_order_of_price(effects: Sequence[Some]) -> list[Some]:
    """Returns the effects, the cheapest first, those without a price last."""
    return sorted(effects, key=lambda of: of.price.value if math.isfinite(of.price.value) else math.inf)


def certain_order(prices: Mapping[str, Estimate]) -> str:
    """Returns the sentence that says how certain the order of these prices is; "" of fewer than two known ones.

    Two whose 95 % intervals do not overlap differ. What they share of the noise makes that a cautious answer.
    """
    ends = {name: price.ends() for name, price in prices.items() if math.isfinite(price.value)}
    if len(ends) < 2:
        return ""
    dearer = {name: [other for other in ends if ends[other][0] > ends[name][1]] for name in ends}
    told = "; ".join(f"{name} costs less than {', '.join(others)}" for name, others in dearer.items() if others)
    if told:
        is_whole = 2 * sum(map(len, dearer.values())) == len(ends) * (len(ends) - 1)
        rest = "" if is_whole else " The rest of their order is not certain."
        return f" Prices whose intervals do not overlap: {told}.{rest}"
    return " The intervals of these prices all overlap: their order is not certain."


def table_of(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[list[str]]:
    """Returns cells of a table's rows: the name, ΔH and Δreward of each kind, a price, and a remark."""
    return [
        [
            row["name"],
            *(milli(_estimate(row, f"{kind}_{what}")) for what in ("delta_h", "delta_reward") for kind in kinds),
            MISSING if row["name"] == PLAIN else estimate_in_words(_price(row)),
            row["remark"],
        ]
        for row in rows
    ]
