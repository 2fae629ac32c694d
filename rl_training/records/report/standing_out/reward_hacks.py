"""What stands out in the rewards: they may be earned by what they should not pay for.

Thresholds were chosen by hand: that of length on the trainings of seed 0 of benchmarks/planted_faults.py; the others
before benchmarks/which_reward.py, which judges them as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import pandas as pd

from rl_training.records.pages.writing import format_estimate
from rl_training.records.report.proposals import Task
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.noise import correlation
from rl_training.records.report.standing_out.run_records import RunRecords
from rl_training.records.report.story.broken_line import broken_line, rise_of
from rl_training.records.report.story.reward_functions import STD, is_penalty, reward_weights
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.measured import REWARD_SUM, of_steps
from rl_training.records.table.trends import MIN_STEPS, first_of_trailing
from rl_training.statistics.estimate import Estimate

MIN_LENGTH_GROWTH = 0.15  # share of the first length
MIN_LENGTH_CORRELATION = 0.4  # of the changes of length and reward
MIN_FALL = 0.06  # of a function's standard deviation, by which steps must have lowered it; .03 for rewards of 0 and 1
MIN_STDERRS_LOWERED = 3.0  # high, because every step is looked at; not enough alone, since few rewards vary little


@dataclass(frozen=True)
class FunctionLowered(Anomaly):
    """The steps raise the reward that is paid, and lower a reward function, paid or watched, which is no penalty.

    Args:
        function: Its name.
        is_watched: Whether it is known not to be paid.
        paid: What the measured steps did to the paid reward.
        lowered: What they did to this function.
        last: The last step that both are known at.
    """

    function: str
    is_watched: bool
    paid: Estimate
    lowered: Estimate
    last: int

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        run = records.run
        paid = run.estimates(REWARD_SUM)
        prefix = f"{REWARD_SUM}/"
        for function in (name.removeprefix(prefix) for name in run.names() if name.startswith(prefix)):
            if is_penalty(run, function):
                continue
            sums = {step: total for step, total in run.estimates(f"{prefix}{function}").items() if step in paid}
            spread = run.logged(STD.format(function)).head(MIN_STEPS).mean()
            least = MIN_FALL * (spread if spread > 0 else 1.0)
            is_lowered = pd.Series(
                {
                    step: total.value < -max(least, MIN_STDERRS_LOWERED * total.stderr) and paid[step].bounds()[0] > 0
                    for step, total in sums.items()
                    if math.isfinite(total.stderr)
                },
            )
            since = first_of_trailing(is_lowered)
            if since is not None:
                last = int(is_lowered.index[-1])
                is_watched = reward_weights(run).get(function) == 0
                return cls(since, function, is_watched, paid[last], sums[last], last)
        return None

    @property
    def evidence(self) -> str:
        return (
            f"Steps raise the reward that is paid, by {format_estimate(self.paid)} {of_steps(self.paid, 'in all')}, "
            f"and lower `{self.function}`, by {format_estimate(self.lowered, times=-1.0)} (measured up to step "
            f"{self.last})."
        )

    def advice(self, wording: Wording) -> Task:
        then = "pay for it, or stop" if self.is_watched else "correct what pays for them"
        return Task(
            f"read the responses that earn most: they earn it without `{self.function}`. Then {then}",
            target=f"what is paid instead of {self.function}",
        )


@dataclass(frozen=True)
class LengthGrows(Anomaly):
    """Responses grow longer as reward rises, and both move together from step to step.

    Args:
        lengths: Mean lengths by step, in tokens.
        growth: By how much they have grown.
        together: Correlation of the changes of length and reward from step to step.
    """

    lengths: pd.Series[float]
    growth: Estimate
    together: Estimate

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        lengths, reward = records.length.align(records.reward, join="inner")
        line = broken_line(lengths)
        if line is None or len(lengths) < MIN_STEPS or not rise_of(reward).bounds()[0] > 0:
            return None
        together = correlation(lengths.diff().dropna(), reward.diff().dropna())
        has_grown = line.rise.bounds()[0] > MIN_LENGTH_GROWTH * line.start
        if not (has_grown and together.bounds()[0] > 0 and together.value > MIN_LENGTH_CORRELATION):
            return None
        return cls(int(lengths.index[0]), lengths, line.rise, together)

    @property
    def evidence(self) -> str:
        first, last = self.lengths.index[[0, -1]]
        return (
            f"Responses grow longer as reward rises: by {format_estimate(self.growth)} tokens, "
            f"{self.lengths[first]:.0f} at step {first} and {self.lengths[last]:.0f} at step {last}. "
            f"From step to step the two move together: correlation {format_estimate(self.together)}."
        )

    def advice(self, wording: Wording) -> Task:
        return Task("check whether the reward function pays for length", target="reward for length")
