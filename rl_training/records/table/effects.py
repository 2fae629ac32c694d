"""The effects and prices of interventions, as the probe measured them.

Values are the probe's running means (`intervention/NAME/mean_…`) at the last measured step, and that step's own effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_training.records.table.estimates import last_of
from rl_training.records.table.rates import is_falling
from rl_training.records.table.series import Run, once_per_run
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

NAMES = re.compile(r"^intervention/(.+)/mean_delta_h$")
METRICS = {  # by field of Effect
    "delta_h": "mean_delta_h", "delta_reward": "mean_delta_reward", "price": "mean_price", "at_last_step": "delta_h",
    "kept": "mean_delta_h_kept", "halves_at": "kept_halves_at",
}  # fmt: skip
NO_FALL = "entropy does not fall significantly now"
NO_EFFECT = "the interval of its effect in one step includes 0"


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

    @property
    def advised_strength(self) -> str:
        """The strength that halves the fall, or else the one that the name says; "" if it says none."""
        is_known = math.isfinite(self.halves_at.value)
        return f"{self.halves_at.value:.2g}" if is_known else self.name.partition(":")[2]


@once_per_run
def effects_of(run: Run) -> list[Effect]:
    """Return the effect of each intervention at the last step that measured it.

    Interventions that keep entropy significantly come first, those that spend significantly more come last; each group
    is sorted by price.
    """
    names = [match[1] for match in map(NAMES.match, run.names()) if match]
    return sorted((_effect_of(run, name) for name in names), key=_rank)


def _effect_of(run: Run, name: str) -> Effect:
    """Return the effect of an intervention. No strength halves a fall that is not there, or without an effect."""
    numbers = {
        field: last_of(run.rows(f"intervention/{name}/{metric}")) or Estimate.missing("it was not recorded")
        for field, metric in METRICS.items()
    }
    if math.isfinite(numbers["halves_at"].value):
        if not is_falling(run):
            numbers["halves_at"] = Estimate.missing(NO_FALL)
        elif not is_significant(numbers["delta_h"]):
            numbers["halves_at"] = Estimate.missing(NO_EFFECT)
    mean = f"intervention/{name}/{METRICS['delta_h']}"
    strengths = run.rows(mean)["strength"].dropna()
    strength = float(strengths.iloc[-1]) if len(strengths) else math.nan
    return Effect(name, **numbers, steps=run.measured_steps(mean), strength=strength)


def _rank(effect: Effect) -> tuple[int, bool, float]:
    (low, high) = effect.delta_h.bounds()
    side = 0 if low > 0 else 2 if high < 0 else 1
    return side, math.isnan(effect.price.value), effect.price.value


def halving(effects: Sequence[Effect]) -> list[Effect]:
    """Return the effects with a strength that halves the fall, the first of each intervention."""
    by_name = {effect.bare_name: effect for effect in reversed(effects) if not math.isnan(effect.halves_at.value)}
    return [effect for effect in effects if by_name.get(effect.bare_name) is effect]


def keeping(effects: Sequence[Effect]) -> list[Effect]:
    """Return the effects that significantly keep entropy at their own strength."""
    return [effect for effect in effects if effect.delta_h.bounds()[0] > 0]


def earned_per_nat(run: Run) -> float:
    """Return the reward that plain steps earn per nat of entropy that they spend, the yardstick of prices.

    nan unless both are significant: their ratio could be anything.
    """
    fall = run.last("intervention/plain_mean_delta_h")
    gain = run.last("intervention/plain_mean_delta_reward")
    if fall is None or gain is None or not (fall.bounds()[1] < 0 and gain.bounds()[0] > 0):
        return math.nan
    return -gain.value / fall.value
