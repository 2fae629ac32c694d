"""What stands out in the steps: one step, or many, are too large.

By the KL of a step: StepBreaksReward, StepExceedsEntropy, ManyLargeSteps. By predictions: FirstOrderFails. By reward
and entropy, if no step's KL is recorded: RewardIsGone.

Thresholds were chosen by hand, on the trainings of seed 0 of benchmarks/planted_faults.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import pandas as pd

from rl_training.records.pages.writing import format_estimate, milli, steps_of
from rl_training.records.report.proposals import Change
from rl_training.records.report.standing_out.finding import Anomaly
from rl_training.records.report.standing_out.noise import MIN_JUMP_STDERRS, noise_of_a_step
from rl_training.records.report.standing_out.run_records import RunRecords, in_percent, recent
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.estimates import by_about_step, last_of
from rl_training.records.table.measured import of_one_step
from rl_training.records.table.rates import forward_and_backward, predictions_disagree
from rl_training.records.table.trends import MIN_STEPS, share_of
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import mean_of

LARGE_KL = 0.1  # a step's KL over entropy, both per token; ten times target_kl_share="auto"
MIN_KL_OF_RESPONSE = 0.05  # KL per response, in nats, below which no step counts as large
MIN_KL_BEYOND_ENTROPY = 1.0  # likewise, for a step that exceeds the entropy
MIN_ESS = 0.5  # ESS as a share of the sequences; with less there is no estimate
MIN_LARGE_SHARE = 0.2  # share of the steps, from which on many are large
MIN_OF_LARGEST = 0.2  # of the largest KL: where other steps moved far more, no single one is to blame
LEAST_ENTROPY = 1e-12  # in nats; without it, any KL would be large beside an entropy of 0

# What one step must have cost.
MIN_BREAK = 0.2  # standard deviations of the rewards
STEPS_AROUND = 4  # averaged before and after the step
MIN_STEPS_AFTER = 2

# What must have been lost where no step's KL is recorded.
BEST_STEPS = 3  # that the best reward averages
MIN_STDERRS_BELOW_BEST = 4.0  # standard errors that reward has fallen below its best
MIN_REWARD_LOSS = 0.5  # share of the best reward that is gone
MIN_ENTROPY_CHANGE = 0.5  # share by which entropy changes after the best step


@dataclass(frozen=True)
class _TooLarge(Anomaly):
    """Steps are too large, and a bound on them is what to do."""

    def advice(self, wording: Wording) -> Change:
        return wording.bounded_step()


def _measured_steps(records: RunRecords) -> pd.DataFrame:
    """Return a row for each step whose KL was measured alone, by that step.

    Returns:
        Rows as `Run.rows` has them, of the step's KL per token, and the columns: entropy of the policy before it, in
        nats per token; kl_of_response, in nats, 0 without a length; is_large, whether the step moved the policy far
        beside its entropy, or so that few sequences still describe it.
    """
    rows = of_one_step(records.run, "measured/kl")
    steps = by_about_step(rows.assign(ess=records.run.values("measured/ess")))
    steps = steps.assign(
        entropy=records.run.token_entropy().reindex(steps.index),
        kl_of_response=steps["value"] * records.length.reindex(steps.index).fillna(0.0),
    )
    is_far = steps["value"] > LARGE_KL * steps["entropy"].clip(lower=LEAST_ENTROPY)
    is_far &= steps["kl_of_response"] > MIN_KL_OF_RESPONSE
    return steps.assign(is_large=is_far | (steps["ess"] < MIN_ESS))


@dataclass(frozen=True)
class StepBreaksReward(_TooLarge):
    """One large step, after which reward was lower than before. `since` is that step.

    Args:
        kl, entropy: Of that step, in nats per token.
        before, after: Rewards of the steps around it.
    """

    kl: float
    entropy: float
    before: pd.Series[float]
    after: pd.Series[float]

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        steps = _measured_steps(records)
        is_among_largest = steps["value"] >= MIN_OF_LARGEST * steps["value"].max()
        suspects = steps[steps["is_large"] & (is_among_largest | (steps["value"] > steps["entropy"]))]
        reward = records.reward
        for step, kl, entropy in zip(suspects.index, suspects["value"], suspects["entropy"], strict=True):
            before = reward[reward.index <= step].tail(STEPS_AROUND)
            after = reward[reward.index > step].head(STEPS_AROUND)
            if len(after) < MIN_STEPS_AFTER:
                continue
            noise = MIN_JUMP_STDERRS * noise_of_a_step(records) / math.sqrt(len(after))
            if before.mean() - after.mean() > max(noise, MIN_BREAK * records.largest_spread):
                return cls(int(step), kl, entropy, before, after)
        return None

    @property
    def evidence(self) -> str:
        before, after = (f"{rewards.mean():.3f} ({steps_of(rewards)})" for rewards in (self.before, self.after))
        return (
            f"One step was too large: step {self.since} moved the policy by {self.kl:.2g} nats per token (KL, with an "
            f"entropy of {self.entropy:.2g}), and reward went from {before} to {after}."
        )


@dataclass(frozen=True)
class StepExceedsEntropy(_TooLarge):
    """One step whose KL exceeded all of the policy's entropy. `since` is that step.

    Args:
        kl: Its KL.
        entropy: The entropy before it, both in nats per token.
    """

    kl: Estimate
    entropy: float

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        steps = _measured_steps(records)
        exceeds = steps["low"] > steps["entropy"].clip(lower=LEAST_ENTROPY)
        first = steps[exceeds & (steps["kl_of_response"] > MIN_KL_BEYOND_ENTROPY)].head(1)
        kl = last_of(first)
        return None if kl is None else cls(int(first.index[0]), kl, float(first["entropy"].iloc[0]))

    @property
    def evidence(self) -> str:
        return (
            f"A step is too large: step {self.since} moved the policy by {format_estimate(self.kl)} nats per token "
            f"(KL), and its entropy was {self.entropy:.2g}."
        )


@dataclass(frozen=True)
class ManyLargeSteps(_TooLarge):
    """Many steps are large. `since` is the first of them.

    Args:
        share: Of the steps whose KL was measured.
        median_kl: Of all of these steps, in nats per token.
    """

    share: Estimate
    median_kl: float

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        steps = _measured_steps(records)
        large = steps[steps["is_large"]]
        share = share_of(len(large), len(steps))
        if len(steps) < MIN_STEPS or not share.bounds()[0] > MIN_LARGE_SHARE:
            return None
        return cls(int(large.index[0]), share, float(steps["value"].median()))

    @property
    def evidence(self) -> str:
        return (
            f"Steps are too large: {in_percent(self.share)} of them moved the policy by more than {LARGE_KL:g} of its "
            "entropy, or so far that less than half of the sequences' weight is left. KL is "
            f"{self.median_kl:.2g} nats per token in the median."
        )


@dataclass(frozen=True)
class FirstOrderFails(_TooLarge):
    """Predictions before and after a step disagree: steps are too large for first order.

    Args:
        forward: Mean predicted change of entropy.
        half_difference: Half of forward − backward, which would be 0 in first order.
    """

    forward: Estimate
    half_difference: Estimate

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        predictions = forward_and_backward(records.run)
        if predictions is None or not predictions_disagree(records.run):
            return None
        return cls(int(recent(records.run.values("delta_h/forward")).index[0]), *predictions)

    @property
    def evidence(self) -> str:
        return (
            f"Steps are too large for first order: half of forward − backward is {milli(self.half_difference)} "
            f"thousandths of a nat, of a forward of {milli(self.forward)}, the mean over the last steps."
        )


@dataclass(frozen=True)
class RewardIsGone(Anomaly):
    """Reward fell for good, and entropy changed by half or more as it did. `since` is the step before.

    Args:
        best, end: Rewards of the last good steps, and of the last steps.
        entropy_before, entropy_after: Its means around the last good step, in nats.
    """

    best: pd.Series[float]
    end: pd.Series[float]
    entropy_before: float
    entropy_after: float

    @classmethod
    def find(cls, records: RunRecords) -> Self | None:
        reward = records.reward
        is_known_by_kl = len(of_one_step(records.run, "measured/kl")) > 0
        if is_known_by_kl or len(reward) < MIN_STEPS or not records.set_up.sequences > 0:
            return None
        end = reward.tail(MIN_STEPS)
        step = _last_good_step(reward, end)
        if step is None:
            return None
        best = reward[reward.index <= step].tail(BEST_STEPS)
        noise = 2 * records.largest_spread / math.sqrt(records.set_up.sequences) or noise_of_a_step(records)
        least = max(MIN_STDERRS_BELOW_BEST * noise, MIN_REWARD_LOSS * float(best.mean()))
        levels = records.run.token_entropy()
        before = float(levels[levels.index <= step].tail(BEST_STEPS).mean())
        after = float(levels[levels.index > step].head(BEST_STEPS).mean())
        has_turned = before > 0 and abs(after / before - 1) > MIN_ENTROPY_CHANGE
        if not (has_turned and best.mean() - end.mean() > least):
            return None
        return cls(step, best, end, before, after)

    @property
    def evidence(self) -> str:
        return (
            f"Reward went from {self.best.mean():.3f} ({steps_of(self.best)}) to "
            f"{format_estimate(mean_of(list(self.end)))} ({steps_of(self.end)}), and entropy from "
            f"{self.entropy_before:.2g} to {self.entropy_after:.2g} in the steps after step {self.since}."
        )

    def advice(self, wording: Wording) -> Change:
        return wording.smaller_steps()


def _last_good_step(reward: pd.Series[float], end: pd.Series[float]) -> int | None:
    """Return the last step with a reward at least halfway from its mean at the end to its best; None without one."""
    best = float(reward.rolling(BEST_STEPS, min_periods=1).mean().max())
    good = reward.index[(reward >= 0.5 * best + 0.5 * end.mean()).to_numpy()]
    return None if good.empty else int(good[-1])
