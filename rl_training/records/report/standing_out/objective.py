"""What stands out in the objective: weight decay, the KL term or the entropy bonus outweighs the reward.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
Weight decay is not among their faults: its thresholds have only been tested on records made for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from rl_training.records.pages.writing import format_estimate, milli, steps_of
from rl_training.records.report.proposals import Change
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.run_records import RunRecords, recent, span_of
from rl_training.records.report.story.broken_line import broken_line
from rl_training.records.report.wording.base import Wording, rounded
from rl_training.records.table.trends import MIN_STEPS, mean_of_recent
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant, mean_of

MIN_ALLOWED_GAIN = 0.25  # least gain that the KL term must allow, in standard deviations of the reward
MIN_ENTROPY_RISE = 0.25  # least rise of entropy for a bonus to win, as a share of its initial level
MIN_DECAY_OF_ENTROPY = 0.01  # of the level, by a step
MIN_SHRINKAGE = 0.2  # share of the weights that decay takes away over the run
LARGE_WEIGHT_DECAY = 1.0  # one above it is advised to be 0; a smaller one, to be a tenth
FIRST_ENTROPIES = 3  # logged steps whose mean is the initial level


@dataclass(frozen=True)
class WeightDecayWins(Anomaly):
    """Weight decay moves entropy more than the gradients do, or takes a notable part of the weights.

    Args:
        weight_decay: The setting.
        shrinkage: Share of the weights that it has taken.
        effect: How it changes entropy, per step; None if the gradients change it by as much.
    """

    weight_decay: float
    shrinkage: float
    effect: Estimate | None

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        weight_decay = records.set_up.number("weight_decay", records.set_up.optimizer("weight_decay"))
        if not weight_decay > 0:
            return None
        rates = records.rates
        shrinkage = 1 - math.exp(-weight_decay * float(rates.sum())) if len(rates) else 0.0
        effect = cls._effect_on_entropy(records)
        if effect is None and not shrinkage > MIN_SHRINKAGE:
            return None
        return cls(records.run.steps[0], weight_decay, shrinkage, effect)

    @staticmethod
    def _effect_on_entropy(records: RunRecords) -> Estimate | None:
        """Return how decay changes entropy, per step, if that is more than the other parts of a step do."""
        parts = {name: recent(records.run.values(f"delta_h/part/{name}")) for name in ("decay", "momentum", "gradient")}
        effect = mean_of([float(value) for value in parts.pop("decay")])
        others = sum(abs(float(part.mean())) for part in parts.values() if len(part))
        level = float(records.run.token_entropy().tail(MIN_STEPS).mean())
        wins = is_significant(effect) and abs(effect.value) > max(others, MIN_DECAY_OF_ENTROPY * level)
        return effect if wins else None

    @property
    def evidence(self) -> str:
        effect = f", and moves entropy by {milli(self.effect)} thousandths of a nat a step" if self.effect else ""
        return (
            f"Weight decay wins: weight_decay={self.weight_decay:g} has taken {100 * self.shrinkage:.0f}% of the "
            f"weights{effect}."
        )

    def advice(self, wording: Wording) -> Change:
        smaller = 0 if self.weight_decay > LARGE_WEIGHT_DECAY else rounded(self.weight_decay / 10)
        return wording.fields(weight_decay=smaller)


@dataclass(frozen=True)
class ReferenceWins(Anomaly):
    """The KL term allows next to no gain in reward, and reward has not risen.

    If the KL of a response is weighted by beta, the best policy gains about Var(A)/beta of the advantage A. Var(A) is 1
    if rewards are divided by their spread, otherwise it is the spread squared.

    Args:
        beta: The weight of the KL term.
        gain: The allowed gain, in standard deviations of the reward.
        spread: Their standard deviation.
        rise: By how much reward has changed.
        steps: The first and last logged step of the reward.
        distance: KL to the first model, in nats per token; nan if not logged.
    """

    beta: float
    gain: float
    spread: float
    rise: Estimate
    steps: tuple[int, int]
    distance: Estimate

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        beta = records.set_up.number("beta", 0.0)
        reward = records.reward
        spread = float(records.spread.mean()) if len(records.spread) else 0.0
        if not beta > 0 or len(reward) < MIN_STEPS or records.reward_rise.bounds()[0] > 0 or not spread > 0:
            return None
        is_divided = str(records.set_up.trainer("scale_rewards", "group")).lower() not in ("none", "false")
        gain = (1.0 if is_divided else spread) / beta
        if gain >= MIN_ALLOWED_GAIN:
            return None
        distance = mean_of_recent(records.run.logged("kl"))
        steps = span_of(reward)
        return cls(steps[0], beta, gain, spread, records.reward_rise, steps, distance)

    @property
    def evidence(self) -> str:
        is_known = math.isfinite(self.distance.value)
        distance = f"; KL to the first model is {format_estimate(self.distance)} nats per token" if is_known else ""
        return (
            f"The KL term wins: with beta={self.beta:g} reward can gain some {self.gain * self.spread:.2g} in all. It "
            f"has changed by {format_estimate(self.rise, signed=True)} over {steps_of(self.steps)}{distance}."
        )

    def advice(self, wording: Wording) -> Change:
        return wording.fields(beta=float(f"{self.beta * self.gain / 10:.1g}"))


@dataclass(frozen=True)
class BonusWins(Anomaly):
    """An entropy bonus raises entropy while reward does not rise.

    Args:
        weight: The weight of the bonus.
        entropy_rise, reward_rise: By how much both have changed.
        steps: The first and last step with an entropy.
    """

    weight: float
    entropy_rise: Estimate
    reward_rise: Estimate
    steps: tuple[int, int]

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        weight = records.set_up.number("entropy_coef", 0.0)
        levels = records.run.token_entropy()
        line = broken_line(levels)
        if not weight > 0 or line is None or len(levels) < MIN_STEPS or records.reward_rise.bounds()[0] > 0:
            return None
        start = max(line.start, float(levels.head(FIRST_ENTROPIES).mean()))
        if not line.rise.bounds()[0] > MIN_ENTROPY_RISE * start:
            return None
        steps = span_of(levels)
        return cls(steps[0], weight, line.rise, records.reward_rise, steps)

    @property
    def evidence(self) -> str:
        return (
            f"The entropy bonus wins: with entropy_coef={self.weight:g} entropy has risen by "
            f"{format_estimate(self.entropy_rise)} nats, and reward has changed by "
            f"{format_estimate(self.reward_rise, signed=True)}, over {steps_of(self.steps)}."
        )

    def advice(self, wording: Wording) -> Change:
        # How small a bonus must be is not known; docs/how_to/entropy_rises.md has a small one that failed.
        return wording.fields(entropy_coef=0)
