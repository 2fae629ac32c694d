"""What stands out in the rewards: they are no numbers, all equal, or equal for most prompts.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import pandas as pd

from rl_training.records.pages.writing import format_estimate, steps_of
from rl_training.records.report.proposals import Change, Proposal, Task
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.run_records import FEW_STEPS, RunRecords, in_percent, recent, span_of
from rl_training.records.report.story.reward_functions import MEAN, function_names
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.series import LOGGED
from rl_training.records.table.trends import MIN_STEPS, first_of_trailing
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import mean_of

FEW_MIXED = 0.1  # share of prompts
VISIBLE = 0.5  # share of responses cut off from which it is mentioned along with equal rewards
STEPS_BEFORE = 4  # averaged before rewards became equal
SAME = 1e-9  # rewards closer than this are equal
HIGHEST = 1.0  # of a reward of 0 and 1
HARDLY_EARNED = 0.05  # of the highest possible reward
NOTHING_LEARNED = "Nothing has been learned from rewards"
SAME_REWARDS = "equal rewards"  # what the tasks about them are about


@dataclass(frozen=True)
class NotANumber(Anomaly):
    """The reward is nan or infinite, or a reward function is.

    Args:
        function: The name of the function; "" for the reward itself.
        steps: The first and last step without a number.
        is_infinite: Whether it is infinite at one of them.
    """

    function: str
    steps: tuple[int, int]
    is_infinite: bool

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        functions = {MEAN.format(name): name for name in function_names(records.run)}
        rewards = records.run.rows("reward", LOGGED)["value"].dropna()
        last = rewards.index.max() if len(rewards) else math.inf
        steps = [step for step in records.run.steps if step <= last]
        logged = records.run.names(LOGGED)
        for name in [*functions, "reward"]:
            values = records.run.rows(name, LOGGED)["value"].reindex(steps)
            is_number = values.index.isin(records.run.logged(name).index)
            since = first_of_trailing(pd.Series(~is_number, values.index))
            if since is None or name not in logged:
                continue
            missing = values[values.index >= since]
            if len(missing) >= min(FEW_STEPS, len(values)):
                return cls(since, functions.get(name, ""), span_of(missing), bool(missing.notna().any()))
        return None

    @property
    def evidence(self) -> str:
        what = f"The reward function `{self.function}`" if self.function else "The reward"
        value = "nan or infinite" if self.is_infinite else "nan"
        return f"{what} is {value}, not a number, {steps_of(self.steps)}: nothing is learned from it."

    @property
    def headline(self) -> str:
        return NOTHING_LEARNED

    def advice(self, wording: Wording) -> Task:
        return Task(f"correct what {self.function or 'reward'} returns", target="values of the reward")


@dataclass(frozen=True)
class AllEqual(Anomaly):
    """Every response earns the same reward.

    Args:
        rewards: The equal ones, by step.
        before: Those of the steps before.
        mixed: Share of prompts with unequal rewards.
        cut_off: Share of responses that are cut off; None unless that is most of them.
    """

    rewards: pd.Series[float]
    before: pd.Series[float]
    mixed: Estimate
    cut_off: Estimate | None

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        rewards = records.reward
        if rewards.empty:
            return None
        spread = records.run.logged("reward_std").reindex(rewards.index)
        mixed = records.mixed.reindex(rewards.index, fill_value=0.0)
        since = first_of_trailing((spread == 0) & (mixed == 0) & ((rewards - rewards.iloc[-1]).abs() < SAME))
        if since is None:
            return None
        equal = rewards[rewards.index >= since]
        if len(equal) < min(FEW_STEPS, len(rewards)):
            return None
        cut_off = records.cut_off.reindex(equal.index).dropna()
        return cls(
            since,
            rewards=equal,
            before=rewards[rewards.index < since],
            mixed=records.of_prompts(mixed.reindex(equal.index)),
            cut_off=records.of_responses(cut_off) if len(cut_off) and cut_off.mean() > VISIBLE else None,
        )

    @property
    def is_learned(self) -> bool:
        """Whether reward has risen to this, and was never above it."""
        if self.before.empty:
            return False
        reward = self.rewards.iloc[-1]
        return bool(reward > self.before.max() - SAME and self.before.mean() < reward)

    @property
    def evidence(self) -> str:
        evidence = (
            f"Every response earns the same reward, {self.rewards.iloc[-1]:g}: all advantages are 0. Prompts with "
            f"unequal rewards: {in_percent(self.mixed)}, {steps_of(self.rewards)}."
        )
        if len(self.before):
            before = self.before.tail(STEPS_BEFORE)
            evidence += f" Before, it was {before.mean():.3f} ({steps_of(before)})."
        if self.is_learned:
            return f"{evidence} No step had a higher one: nothing is left to learn here."
        if self.cut_off:
            return f"{evidence} {in_percent(self.cut_off)} of the responses are cut off at the maximum length."
        return evidence

    @property
    def headline(self) -> str:
        return "" if self.is_learned else NOTHING_LEARNED

    def advice(self, wording: Wording) -> Proposal:
        if self.is_learned:
            return Task(
                "stop here, or give harder prompts, or a reward that still differs between responses",
                target=SAME_REWARDS,
            )
        if self.cut_off:
            return wording.longer_responses()
        if self.rewards.iloc[-1] == HIGHEST:
            return Task(
                "read responses: if they are right, give harder prompts; if not, correct the reward function",
                target=SAME_REWARDS,
            )
        was_earned = len(self.before) > 0 and self.before.tail(STEPS_BEFORE).mean() > HARDLY_EARNED
        if self.rewards.iloc[-1] <= 0 and not was_earned:
            return Task(
                "read responses: if some are right, correct the reward function, which gives all of them the same; if "
                "none is, give easier prompts, or a reward for a part of the task",
                target=SAME_REWARDS,
            )
        return Task(
            "look at responses and their rewards: the reward function gives all of them the same", target=SAME_REWARDS
        )


@dataclass(frozen=True)
class HardlyMixed(Anomaly):
    """Hardly any prompt has responses with unequal rewards.

    Args:
        mixed: The share of prompts that do.
        steps: The first and last of the steps that it was averaged over.
        mean: The mean reward.
    """

    mixed: Estimate
    steps: tuple[int, int]
    mean: Estimate

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        shares = recent(records.mixed)
        if len(shares) < MIN_STEPS or not shares.any():
            return None
        mixed = records.of_prompts(shares)
        if mixed.bounds()[1] >= FEW_MIXED:
            return None
        steps = span_of(shares)
        since = first_of_trailing(records.mixed.rolling(MIN_STEPS, min_periods=1).mean() < FEW_MIXED) or steps[0]
        return cls(since, mixed, steps, mean_of(list(recent(records.reward))))

    @property
    def evidence(self) -> str:
        return (
            f"Only {in_percent(self.mixed)} of the prompts have responses with unequal rewards, "
            f"{steps_of(self.steps)}; the others have zero advantage. The mean reward is {format_estimate(self.mean)}."
        )

    def advice(self, wording: Wording) -> Change:
        return wording.more_unequal_rewards().followed_by(", or prompts nearer to a reward of one half")
