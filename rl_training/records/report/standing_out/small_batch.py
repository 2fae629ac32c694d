"""What stands out in the batch: it is so small that a step follows noise.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from rl_training.records.pages.writing import milli
from rl_training.records.report.proposals import Proposal, Task
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.noise import fall_as_if_by_lot
from rl_training.records.report.standing_out.run_records import RunRecords, recent
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.estimates import last_of
from rl_training.records.table.trends import line_through
from rl_training.statistics.estimate import Estimate

MAX_BATCH_RATIO = 0.25  # batch over noise scale
ADVISED_BATCH_RATIO = 0.5
MAX_REWARD_GAIN = 0.25  # standard deviations of the reward: if it may have gained more, it may be learning
MIN_STEPS_OF_REWARD = 12  # logged steps that reward must have had to rise
# Times the batch, of what is advised.
MIN_TIMES = 2
MAX_TIMES = 16
TIMES_IF_UNKNOWN = 8  # no upper end of the ratio above 0


@dataclass(frozen=True)
class StepFollowsNoise(Anomaly):
    """The batch is far below the noise scale, and reward does not rise.

    Args:
        ratio: Ends of the interval of the batch over the noise scale.
        rate: Change of the reward per step.
        is_by_lot: Whether rewards differ within prompts as if drawn by lot.
    """

    ratio: tuple[float, float]
    rate: Estimate
    is_by_lot: bool

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        reward = records.reward
        ratio = last_of(records.run.with_interval("gns/batch_ratio"))
        if ratio is None or len(reward) < MIN_STEPS_OF_REWARD or not ratio.bounds()[1] < MAX_BATCH_RATIO:
            return None
        rate = line_through(reward)
        low, high = rate.bounds()
        possible_gain = high * float(reward.index[-1] - reward.index[0])
        if low > 0 or possible_gain > MAX_REWARD_GAIN * float(records.spread.mean()):
            return None
        if recent(records.spread).max() == 0:
            return None
        return cls(int(reward.index[0]), ratio.bounds(), rate, fall_as_if_by_lot(records))

    @property
    def evidence(self) -> str:
        low, high = self.ratio
        reward = "reward falls" if self.rate.bounds()[1] < 0 else "reward has not detectably risen"
        evidence = (
            f"A step follows noise: the batch is {max(low, 0.0):.2g} to {high:.2g} of the gradient's noise scale, and "
            f"{reward} ({milli(self.rate)} thousandths a step)."
        )
        return f"{evidence} Within prompts, rewards differ as if drawn by lot." if self.is_by_lot else evidence

    def advice(self, wording: Wording) -> Proposal:
        high = self.ratio[1]
        times = max(MIN_TIMES, math.ceil(ADVISED_BATCH_RATIO / high)) if high > 0 else TIMES_IF_UNKNOWN
        larger = wording.larger_batch(min(times, MAX_TIMES)).followed_by(", or a lower learning_rate")
        if not self.is_by_lot:
            return larger
        return Task(
            "check whether the reward function returns rewards in the order of the completions; if it does, "
            f"{larger.text}",
            larger.settings,
            target="order of the rewards",
        )
