"""What stands out in the rewards: nothing to learn from, a jump, or a response length that grows with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from rl_training.records.pages.writing import format_estimate, size_and_side, steps_of
from rl_training.records.report.standing_out.line import (
    EQUAL,
    FEW_STEPS,
    JUMP,
    LENGTH,
    LOOPHOLE,
    NOT_A_NUMBER,
    UNMIXED,
    Line,
    RunRecords,
    in_percent,
    recent,
)
from rl_training.records.report.standing_out.noise import MIN_JUMP_STDERRS, correlation, noise_of_a_step
from rl_training.records.report.story.broken_line import broken_line, rise_of
from rl_training.records.report.story.reward_functions import MEAN, STD, function_names, is_penalty, reward_weights
from rl_training.records.report.wording import Advice
from rl_training.records.table.estimates import to_estimates
from rl_training.records.table.measured import REWARD_SUM, of_one_step, of_steps
from rl_training.records.table.series import LOGGED
from rl_training.records.table.trends import MIN_STEPS, first_of_trailing
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference, mean_of

STOP = "Stop here, or give harder prompts, or a reward that still differs between responses."
FEW_MIXED = 0.1  # share of prompts
VISIBLE = 0.5  # share of responses cut off from which it is mentioned along with equal rewards
STEPS_BEFORE, STEPS_AFTER = 4, 3  # steps averaged before and after a jump
MIN_LENGTH_GROWTH = 0.15
MIN_LENGTH_CORRELATION = 0.4  # of the changes of length and reward
MIN_FALL = 0.06  # of a function's standard deviation, by which steps must have lowered it; .03 for rewards of 0 and 1
MIN_STDERRS_LOWERED = 3.0  # high, because every step is looked at; not enough alone, since few rewards vary little
NOTHING_LEARNED = "Nothing has been learned from rewards"
HIGHEST = 1.0  # of a reward of 0 and 1
FIND_CHANGE = "Find what changed at step {step}: the reward function, its service or the data."


def not_a_number(records: RunRecords) -> Line | None:
    """Report a reward that is nan, or a reward function that is."""
    functions = {MEAN.format(name): name for name in function_names(records.run)}
    last = records.reward.index.max() if len(records.reward) else math.inf
    steps = [step for step in records.run.steps if step <= last]
    for name in [*functions, "reward"]:
        values = records.run.rows(name, LOGGED)["value"].reindex(steps)
        since = first_of_trailing(values.isna())
        missing = values[values.index >= since] if since is not None else values.iloc[:0]
        if len(missing) and len(missing) >= min(FEW_STEPS, len(values)) and name in records.run.names(LOGGED):
            function = functions.get(name, "reward")
            whose = f"The reward function `{function}`" if name in functions else "The reward"
            evidence = f"{whose} is nan, not a number, {steps_of(missing)}: nothing is learned from it."
            correct = Advice.to_do(f"Correct what {function} returns.")
            return Line(NOT_A_NUMBER, int(missing.index[0]), evidence, correct, NOTHING_LEARNED)
    return None


def another_reward_falls(records: RunRecords) -> Line | None:
    """Report that the steps raise the reward that is paid, and lower a reward function, paid or watched; no penalty."""
    paid = records.run.estimates(REWARD_SUM)
    weights = reward_weights(records.run)
    for metric in (name for name in records.run.names() if name.startswith(f"{REWARD_SUM}/")):
        function = metric.removeprefix(f"{REWARD_SUM}/")
        if is_penalty(records.run, function):
            continue
        spread = records.run.logged(STD.format(function)).head(MIN_STEPS).mean()
        least = MIN_FALL * (spread if spread > 0 else 1.0)
        sums = records.run.estimates(metric)
        is_fallen = pd.Series(
            {
                step: total.value < -max(least, MIN_STDERRS_LOWERED * total.stderr) and paid[step].bounds()[0] > 0
                for step, total in sums.items()
                if step in paid and math.isfinite(total.stderr)
            }
        )
        since = first_of_trailing(is_fallen)
        if since is None:
            continue
        last = int(is_fallen.index[-1])
        over = of_steps(paid[last], "in all")
        evidence = (
            f"Steps raise the reward that is paid, by {format_estimate(paid[last])} {over}, and lower "
            f"`{function}`, by {format_estimate(sums[last], times=-1.0)} (measured up to step {last})."
        )
        read = f"Read the responses that earn most: they earn it without `{function}`."
        then = "Then pay for it, or stop." if weights.get(function) == 0 else "Then correct what pays for them."
        return Line(LOOPHOLE, since, evidence, Advice.to_do(f"{read} {then}"))
    return None


def all_equal(records: RunRecords) -> Line | None:
    """Report that every response earns the same reward."""
    spread = records.run.logged("reward_std").reindex(records.reward.index)
    if records.reward.empty:
        return None
    same = (spread == 0) & (records.mixed.reindex(records.reward.index, fill_value=0) == 0)
    same &= (records.reward - records.reward.iloc[-1]).abs() < 1e-9
    since = first_of_trailing(same)
    part = records.reward[records.reward.index >= since] if since is not None else records.reward.iloc[:0]
    if since is None or len(part) < min(FEW_STEPS, len(records.reward)):
        return None
    mixed = records.of_prompts(records.mixed.reindex(part.index, fill_value=0.0))
    cut_off = records.cut_off.reindex(part.index).dropna()
    evidence = (
        f"Every response earns the same reward, {part.iloc[-1]:g}: all advantages are 0. Prompts with unequal rewards: "
        f"{in_percent(mixed)}, {steps_of(part)}."
    )
    before = records.reward[records.reward.index < since]
    if len(before):
        evidence += f" Before, it was {before.tail(STEPS_BEFORE).mean():.3f} ({steps_of(before.tail(STEPS_BEFORE))})."
    if len(before) and part.iloc[-1] > records.reward.max() - 1e-9 and before.mean() < part.iloc[-1]:
        return Line(
            EQUAL, since, f"{evidence} No step had a higher one: nothing is left to learn here.", Advice.to_do(STOP)
        )
    if len(cut_off) and cut_off.mean() > VISIBLE:
        share = records.of_responses(cut_off)
        evidence += f" {in_percent(share)} of the responses are cut off at the maximum length."
        return Line(EQUAL, since, evidence, records.wording.longer_responses(), NOTHING_LEARNED)
    look = "Look at responses and their rewards: the reward function gives all of them the same."
    if part.iloc[-1] == HIGHEST:
        look = "Read responses: if they are right, give harder prompts; if not, correct the reward function."
    return Line(EQUAL, since, evidence, Advice.to_do(look), NOTHING_LEARNED)


def hardly_mixed(records: RunRecords) -> Line | None:
    """Report that hardly any prompt has responses with unequal rewards."""
    shares = recent(records.mixed)
    if len(shares) < MIN_STEPS or not shares.any():
        return None
    mixed = records.of_prompts(shares)
    if mixed.bounds()[1] >= FEW_MIXED:
        return None
    since = first_of_trailing(records.mixed.rolling(MIN_STEPS, min_periods=1).mean() < FEW_MIXED)
    mean = mean_of(list(recent(records.reward)))
    evidence = (
        f"Only {in_percent(mixed)} of the prompts have responses with unequal rewards, {steps_of(shares)}; the others"
    )
    evidence += f" have zero advantage. The mean reward is {format_estimate(mean)}."
    to_change = records.wording.more_unequal_rewards().followed_by(", or prompts nearer to a reward of one half")
    return Line(UNMIXED, since or int(shares.index[0]), evidence, to_change)


@dataclass(frozen=True)
class _Jump:
    """A change of reward between two steps that may be a jump.

    Args:
        before, after: Rewards of the averaged steps.
        change: Of their means.
        beyond: What is left of it without what the step in between did.
        by_other_steps: What the other averaged steps may have done, about as much as that one.
        between: What that one did, in words.
    """

    before: pd.Series[float]
    after: pd.Series[float]
    change: Estimate
    beyond: Estimate
    by_other_steps: float
    between: str

    @property
    def score(self) -> float:
        """Its size in standard errors."""
        return (abs(self.beyond.value) - self.by_other_steps) / max(self.beyond.stderr, 1e-12)

    def line(self) -> Line:
        before = self.before
        after = self.after
        step = int(self.after.index[0])
        ends = f"from {before.mean():.3f} ({steps_of(before)}) to {after.mean():.3f} ({steps_of(after)})"
        evidence = f"Reward jumped {ends}: {size_and_side(self.change, 'higher', 'lower')}. {self.between}"
        return Line(JUMP, step, evidence, Advice.to_do(FIND_CHANGE.format(step=step)))


def jump(records: RunRecords) -> Line | None:
    """Report a jump of reward between two steps, larger than the update in between was measured to make."""
    least = 0.2 * records.largest_spread  # without it, the size in standard errors alone decides
    jumps = [jump for jump in _jumps(records) if jump.score > MIN_JUMP_STDERRS and abs(jump.beyond.value) > least]
    return max(jumps, key=lambda jump: jump.score).line() if jumps else None


def _jumps(records: RunRecords) -> Iterator[_Jump]:
    """Yield the change at each step, if it is larger than its neighbours' and what the step itself did is known."""
    reward = records.reward
    noise = noise_of_a_step(records)
    measured = to_estimates(of_one_step(records.run, "measured/delta_reward"))
    for place in range(2, len(reward) - STEPS_AFTER + 1):
        before, after = reward.iloc[max(place - STEPS_BEFORE, 0) : place], reward.iloc[place : place + STEPS_AFTER]
        step = int(after.index[0])
        moves = pd.concat([before, after]).diff().abs()
        if moves[step] < moves.max():
            continue
        error = noise * math.sqrt(1 / len(before) + 1 / len(after))
        change = Estimate(float(after.mean() - before.mean()), error, len(reward))
        by_step = measured.get(step)
        by_others = abs(by_step.value) if by_step is not None else 0.0
        if by_step is not None and math.isfinite(by_step.stderr):
            did = f"The step in between was measured to change it by {format_estimate(by_step, signed=True)}."
            yield _Jump(before, after, change, difference(change, by_step), by_others, did)
        elif _moves_little(records, step):
            did = "The policy hardly moved in the step in between."
            yield _Jump(before, after, change, change, by_others, did)


def _moves_little(records: RunRecords, step: int) -> bool:
    """Return whether the KL per response of the update before this step is known and below a hundredth of a nat."""
    kl = of_one_step(records.run, "measured/kl")["value"].get(step)
    return kl is not None and kl * float(records.length.get(step, math.nan)) < 0.01


def length_with_reward(records: RunRecords) -> Line | None:
    """Report that responses grow longer as reward rises, and that both move together from step to step."""
    length, reward = records.length.align(records.reward, join="inner")
    line = broken_line(length)
    if line is None or len(length) < MIN_STEPS or not rise_of(reward).bounds()[0] > 0:
        return None
    together = correlation(length.diff().dropna(), reward.diff().dropna())
    has_grown = line.rise.bounds()[0] > MIN_LENGTH_GROWTH * line.start
    if not (has_grown and together.bounds()[0] > 0 and together.value > MIN_LENGTH_CORRELATION):
        return None
    evidence = (
        f"Responses grow longer as reward rises: by {format_estimate(line.rise)} tokens, "
        f"{length.iloc[0]:.0f} at step {length.index[0]} and {length.iloc[-1]:.0f} at step {length.index[-1]}. "
        f"From step to step the two move together: correlation {format_estimate(together)}."
    )
    return Line(
        LENGTH, int(length.index[0]), evidence, Advice.to_do("Check whether the reward function pays for length.")
    )
