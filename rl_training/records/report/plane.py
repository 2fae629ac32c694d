"""Interventions plotted by their effect on reward and entropy, relative to the step as it is; and in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from rl_training.mathematics.estimate import Estimate
from rl_training.records.report.drawing import BLACK, BLUE, GREY, ORANGE, Picture, picture
from rl_training.records.report.summary import MISSING, plus_minus
from rl_training.records.report.summary import in_words as estimate_in_words

MILLI = 1e3
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
class Cross:
    """One intervention in the plane: two values, and halves of their 95 % intervals. In nats, and in reward."""

    name: str
    delta_reward: float
    reward_half: float
    delta_h: float
    h_half: float

    @property
    def is_there(self) -> bool:
        values = self.delta_reward, self.delta_h
        return all(map(math.isfinite, values)) and any(values)


def plane(
    file: str, title: str, caption: str, predicted: Sequence[Cross], measured: Sequence[Cross], per: str = "step"
) -> Picture:
    """Returns the picture: each intervention is a cross of two bars (predicted filled, measured open); plain is 0, 0.

    Names are listed at the side, ordered by ΔH. Unknown and exactly zero changes are not drawn.
    """
    shown = {cross.name: cross for cross in (*predicted, *measured) if cross.is_there}  # the measured one's name, last
    order = sorted(shown.values(), key=lambda cross: -cross.delta_h)

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1)
        axes.axvline(0, color=GREY, lw=1)
        handles = [axes.plot([0], [0], "s", color=BLACK, ms=7, label="the step as it is")[0]]
        for crosses, color, face, kind in (
            (predicted, BLUE, BLUE, "predicted"), (measured, ORANGE, "white", "measured"),
        ):  # fmt: skip
            if not crosses:
                continue
            for cross in (cross for cross in crosses if cross.is_there):
                axes.errorbar(
                    MILLI * cross.delta_reward, MILLI * cross.delta_h, MILLI * cross.h_half, MILLI * cross.reward_half,
                    fmt="o", color=color, mfc=face, ms=6, mew=1.5, elinewidth=0.8, label=f"{cross.name}, {kind}",
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


def _name_at_the_side(axes: Axes, order: Sequence[Cross]) -> None:
    low, high = axes.get_ylim()
    places = np.linspace(high, low, len(order) + 2)[1:-1]
    right = axes.get_xlim()[1]
    for cross, place in zip(order, places, strict=True):
        axes.annotate(
            cross.name.replace("$", r"\$"), (MILLI * cross.delta_reward, MILLI * cross.delta_h), (right, place),
            textcoords="data", fontsize=10, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.5, "shrinkA": 1, "shrinkB": 3},
        )  # fmt: skip


@dataclass(frozen=True)
class Interventions:
    """What a page says of the interventions at one checkpoint, at one step or after several."""

    title: str
    sentences: list[str]
    headings: list[str]
    rows: list[list[str]]
    picture: Picture
    lines: Sequence[str] = ()  # commands that try what is said


def interventions_of(content: Mapping[str, Any], name: str) -> Iterator[Interventions]:
    """Yields what a page says of the interventions in a result.json: at one step, and after several."""
    step, tables = content["step"] + 1, content["tables"]
    for key, kinds in (("interventions", ("predicted", "measured")), ("branches", ("measured",))):
        rows = tables.get(key)
        if not rows:
            continue
        steps = rows[0].get("steps", 1)
        of_steps = "1 step" if steps == 1 else f"{steps} steps"
        title = f"Offline {name}: interventions at step {step}" if key == "interventions" else (
            f"Offline {name}: {of_steps} with each intervention, from step {step} on"
        )  # fmt: skip
        updates = max(row["updates"] for row in rows)
        caption = ONE_STEP if key == "interventions" else SEVERAL_STEPS
        crosses = {kind: crosses_of(rows, kind) if kind in kinds else [] for kind in ("predicted", "measured")}
        drawn = plane(
            f"offline_{name}_{key}_{step}.png", title, f"{caption} Means over {updates} U, 95 % intervals.", **crosses,
            per="step" if key == "interventions" else of_steps,
        )  # fmt: skip
        headings = [
            "intervention",
            *(f"{what}, {kind}" for what in ("entropy", "reward") for kind in kinds),
            "price",
            "note",
        ]
        yield Interventions(title, in_words(rows, content["checkpoint"]), headings, table_of(rows, kinds), drawn)


def crosses_of(rows: Sequence[Mapping[str, Any]], kind: str) -> list[Cross]:
    """Returns the crosses of a table's rows, `kind` predicted or measured; that of the step as it is left out."""

    def number(row: Mapping[str, Any], key: str) -> float:
        value = row.get(f"{kind}_{key}")
        return math.nan if value is None else float(value)

    keys = ("delta_reward", "delta_reward_half", "delta_h", "delta_h_half")
    return [Cross(row["name"], *(number(row, key) for key in keys)) for row in rows if row["name"] != PLAIN]


def in_words(rows: Sequence[Mapping[str, Any]], checkpoint: str = "") -> list[str]:
    """Returns sentences to act on: which interventions significantly keep entropy, at what price, and which do not.

    rows        of a table with what was measured of each intervention
    checkpoint  where the command that trains with the cheapest would start
    """
    keeps: list[Mapping[str, Any]] = []
    spends: list[Mapping[str, Any]] = []
    untold, nothing, missing = [], [], []
    for row in rows:
        value, half = row["measured_delta_h"], row["measured_delta_h_half"]
        if row["name"] == PLAIN:
            continue
        if is_nan(value):
            missing.append(f"{row['name']} ({row['remark']})")
        elif value == 0.0 and row["measured_delta_reward"] == 0.0:
            nothing.append(row["name"])
        elif abs(value) <= half:
            untold.append(row["name"])
        else:
            (keeps if value > 0 else spends).append(row)
    keeps.sort(key=lambda row: (is_nan(row["measured_price"]), row["measured_price"]))
    spends.sort(key=lambda row: row["measured_delta_h"])
    said = [
        (
            "Significantly more entropy than the step as it is (95 %), in order of price",
            [_priced(row) for row in keeps],
        ),
        ("Significantly less entropy", [f"{row['name']} {_changes(row)}" for row in spends]),
        ("No significant effect on entropy (more U would help: sweep.update_seeds)", untold),
        ("Exactly no effect here", nothing),
        ("Not available", missing),
    ]
    sentences = [f"{words}: {'; '.join(names)}." for words, names in said if names]
    if keeps:
        sentences[0] += certain_order({row["name"]: _price(row) for row in keeps if not is_nan(row["measured_price"])})
    if keeps and checkpoint:
        branch = f"rl-training train branch={checkpoint} run_dir=NEW intervention={keeps[0]['asked']}"
        sentences.append(f"To train with the first of them from here: {branch}")
    return sentences


def _changes(row: Mapping[str, Any]) -> str:
    return _cell(row, "measured_delta_h")


def _price(row: Mapping[str, Any]) -> Estimate:
    """Returns its price with Fieller's interval."""
    price, low, high = (row[f"measured_price{end}"] for end in ("", "_low", "_high"))
    if is_nan(price):
        return Estimate.missing("it has no price")
    interval = None if is_nan(low) or is_nan(high) else (low, high)
    return Estimate(price + 0.0, reason="its interval is not symmetric", interval=interval)


def _priced(row: Mapping[str, Any]) -> str:
    if is_nan(row["measured_price"]):
        return f"{row['name']} {_changes(row)} (price not measured: no reward in E changed)"
    return f"{row['name']} {_changes(row)} at a price of {estimate_in_words(_price(row))}"


def certain_order(prices: Mapping[str, Estimate]) -> str:
    """Returns the sentence that says how certain the order of these prices is; "" of a single one.

    Two whose 95 % intervals do not overlap differ. What they share of the noise makes that a cautious answer.
    """
    if len(prices) < 2:
        return ""
    ends = {name: price.ends() for name, price in prices.items()}
    dearer = {name: [other for other in ends if ends[other][0] > ends[name][1]] for name in ends}
    told = "; ".join(f"{name} costs less than {', '.join(others)}" for name, others in dearer.items() if others)
    if told:
        is_whole = 2 * sum(map(len, dearer.values())) == len(prices) * (len(prices) - 1)
        rest = "" if is_whole else " The rest of their order is not certain."
        return f" Prices whose intervals do not overlap: {told}.{rest}"
    return " The intervals of these prices all overlap: their order is not certain."


def table_of(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[list[str]]:
    """Returns cells of a table's rows: the name, ΔH and Δreward of each kind, a price, and a remark."""
    return [
        [
            row["name"],
            *(_cell(row, f"{kind}_{quantity}") for quantity in ("delta_h", "delta_reward") for kind in kinds),
            MISSING if row["name"] == PLAIN else estimate_in_words(_price(row)),
            row["remark"],
        ]
        for row in rows
    ]


def is_nan(value: float | None) -> bool:
    """Returns whether a number of result.json is not known."""
    return value is None or math.isnan(value)


def _cell(row: Mapping[str, Any], key: str) -> str:
    value, half = row[key], row[f"{key}_half"]
    return MISSING if is_nan(value) else plus_minus(MILLI * value, MILLI * half, "+")
