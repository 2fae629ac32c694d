"""What stands out in the rewards: they jump between two steps, and the update in between did not do it.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from rl_training.records.pages.writing import format_estimate, size_and_side, steps_of
from rl_training.records.report.proposals import Task
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.noise import MIN_JUMP_STDERRS, noise_of_a_step
from rl_training.records.report.standing_out.run_records import RunRecords
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.estimates import to_estimates
from rl_training.records.table.measured import of_one_step
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference

# Steps averaged before and after a jump.
STEPS_BEFORE = 4
STEPS_AFTER = 3
MIN_JUMP = 0.2  # of the largest standard deviation of rewards in a step; without it, standard errors alone decide
STILL_KL = 0.01  # KL per response, in nats, of a step below which the policy hardly moved


@dataclass(frozen=True)
class RewardJumps(Anomaly):
    """Reward jumps between two steps by more than the update in between was measured to make.

    Args:
        before, after: Rewards of the averaged steps.
        change: That of their means.
        by_update: What the update in between did; None if it is known by its KL alone, to be next to nothing.
        by_other_updates: What the updates between the averaged steps may have done, about as much as that one.
    """

    before: pd.Series[float]
    after: pd.Series[float]
    change: Estimate
    by_update: Estimate | None
    by_other_updates: float

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        least = MIN_JUMP * records.largest_spread
        jumps = [
            jump
            for jump in cls._candidates(records)
            if jump.num_stderrs > MIN_JUMP_STDERRS and abs(jump.beyond_update.value) > least
        ]
        return max(jumps, key=lambda jump: jump.num_stderrs, default=None)

    @classmethod
    def _candidates(cls, records: RunRecords) -> Iterator[Self]:
        """Yield the change at each step, if it is larger than its neighbours' and what the update did is known."""
        reward = records.reward
        noise = noise_of_a_step(records)
        measured = to_estimates(of_one_step(records.run, "measured/delta_reward"))
        still = _still_steps(records)
        moves = np.abs(np.diff(reward.to_numpy()))  # from each step to the next
        for place in range(2, len(reward) - STEPS_AFTER + 1):
            nearby = moves[max(place - STEPS_BEFORE, 0) : place + STEPS_AFTER - 1]
            if moves[place - 1] < nearby.max():  # before anything slower, because a run may have 100,000 steps
                continue
            before = reward.iloc[max(place - STEPS_BEFORE, 0) : place]
            after = reward.iloc[place : place + STEPS_AFTER]
            step = int(after.index[0])
            if after.index[-1] - before.index[0] >= len(before) + len(after):  # what steps in a gap did is not known
                continue
            error = noise * math.sqrt(1 / len(before) + 1 / len(after))
            change = Estimate(float(after.mean() - before.mean()), error, len(reward))
            by_update = measured.get(step)
            by_other_updates = abs(by_update.value) if by_update else 0.0
            if by_update and not math.isfinite(by_update.stderr):
                by_update = None
            if by_update or step in still:
                yield cls(step, before, after, change, by_update, by_other_updates)

    @property
    def beyond_update(self) -> Estimate:
        """What is left of the change without what the update did."""
        return difference(self.change, self.by_update) if self.by_update else self.change

    @property
    def num_stderrs(self) -> float:
        """The size of that in standard errors, without what the other updates may have done."""
        size = abs(self.beyond_update.value) - self.by_other_updates
        return size / max(self.beyond_update.stderr, 1e-12)

    @property
    def evidence(self) -> str:
        ends = [f"{rewards.mean():.3f} ({steps_of(rewards)})" for rewards in (self.before, self.after)]
        between = "The policy hardly moved in the step in between."
        if self.by_update:
            effect = format_estimate(self.by_update, signed=True)
            between = f"The step in between was measured to change it by {effect}."
        return f"Reward jumped from {' to '.join(ends)}: {size_and_side(self.change, 'higher', 'lower')}. {between}"

    def advice(self, wording: Wording) -> Task:
        return Task(
            f"find what changed at step {self.since}: the reward function, its service or the data", target="jump"
        )


def _still_steps(records: RunRecords) -> set[int]:
    """Return the steps before which the update's KL per response is known, and next to nothing."""
    kl, length = of_one_step(records.run, "measured/kl")["value"].align(records.length, join="inner")
    return set(kl.index[(kl * length < STILL_KL).to_numpy()])
