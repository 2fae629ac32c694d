"""The chart of what interventions do to reward and entropy when they are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from rl_training.records.pages.charts import BLUE, GREY, ORANGE, TEXT, Chart, Series
from rl_training.records.pages.drawing import draw
from rl_training.records.pages.labels import label_offsets, side
from rl_training.records.pages.writing import MILLI
from rl_training.records.table.effects import Effect
from rl_training.records.table.estimates import to_rows
from rl_training.records.table.trends import times
from rl_training.statistics.estimate import Estimate

PLANE_HEIGHT = 360  # pixels, the same as in charts.yaml
PRICES = (1.0, 3.0, 10.0)  # of the dotted lines: thousandths of reward per thousandth of a nat


def plane(effects: Sequence[Effect], earned: float = math.nan) -> Chart:
    """Return the chart of effects as they act when kept: each intervention is a labelled cross of error bars.

    The plain step lies at (0, 0). Unknown changes and changes of exactly zero are not drawn.

    Args:
        effects: The interventions.
        earned: Reward that plain steps earn per nat, drawn as a line; nan if unknown.
    """
    ordered = sorted(effects, key=lambda effect: -effect.delta_h.value)
    rewards = to_rows({effect.label: _kept_reward(effect) for effect in ordered})
    entropies = to_rows({effect.label: _kept_entropy(effect) for effect in ordered})
    size = rewards["value"].abs() + entropies["value"].abs()
    is_drawn = np.isfinite(size) & (size > 0)
    rewards = rewards[is_drawn]
    entropies = entropies[is_drawn]
    if rewards.empty:
        return draw("interventions", [], ["no intervention has a known effect"], has_yardstick=False)
    far = float(np.nanmax(np.abs(_coordinates(rewards))))
    ends = _axis_ends(_coordinates(entropies))
    places = {
        str(name): (0.5 + 0.5 * MILLI * rewards["value"][name] / far if far > 0 else 0.5,
                    (ends[1] - MILLI * entropies["value"][name]) / (ends[1] - ends[0]))
        for name in rewards.index
    }  # fmt: skip
    offsets = label_offsets(places, PLANE_HEIGHT)
    crosses = [
        Series.cloud(name, BLUE, "circle", rewards.loc[[name]], entropies.loc[[name]], MILLI, text=name,
                     text_offset=offsets[name], text_side=side(places[name][0]))
        for name in rewards.index
    ]  # fmt: skip
    plain_step = Series.cloud("the step as it is", TEXT, "square", [0.0], [0.0])
    series = [*_price_lines(far, earned), *crosses, plain_step]
    return draw("interventions", series, ends=ends, has_yardstick=earned > 0)


def _coordinates(rows: pd.DataFrame) -> np.ndarray:
    """Return the values and the ends of their intervals, in thousandths; nan for what is not finite."""
    return MILLI * rows[["value", "low", "high"]].where(np.isfinite).to_numpy(dtype=float)


def _axis_ends(coordinates: np.ndarray) -> tuple[float, float]:
    """Return the ends of an axis that shows these and 0, with some room."""
    low = min(float(np.nanmin(coordinates)), 0.0)
    high = max(float(np.nanmax(coordinates)), 0.0)
    room = 0.03 * (high - low) or 0.5
    return low - room, high + room


def _price_lines(far: float, earned: float) -> list[Series]:
    """Return lines of equal price through the plain step, up to `far` thousandths of reward on either side."""
    lines = [
        Series(f"price {price:g}", GREY, [-far, far], [far / price, -far / price], dash=(2, 3)) for price in PRICES
    ]
    if earned > 0:
        label = f"plain steps earn {earned:.2g} per nat"
        lines.append(Series(label, ORANGE, [-far, far], [far / earned, -far / earned]))
    return lines


def _kept_entropy(effect: Effect) -> Estimate:
    """Return the change of entropy when kept; that of one step where the factor between the two is unknown."""
    return effect.delta_h if math.isnan(effect.kept.value) else effect.kept


def _kept_reward(effect: Effect) -> Estimate:
    """Return the change of reward when kept: reward is linear in the step, as entropy is, and has the same factor."""
    factor = effect.kept.value / effect.delta_h.value if effect.delta_h.value else math.nan
    return effect.delta_reward if math.isnan(factor) else times(effect.delta_reward, factor)
