"""Is entropy being spent on reward, or lost? What the first lines of a report say, and the intervals they rest on.

Both are read as lines through the logged steps up to the last one (trends.py). Entropy *falls* where the 95 % interval
of its rate lies below 0 over the last half of the run, 10 steps at least and 50 at most. It then is

lost    where reward stands still: over some stretch up to the last step the interval of its rate reaches 0 or lies
        below, and its upper end, in standard deviations of the rewards, is less than ENOUGH times the share of entropy
        that is lost in it
spent   where that is not so, and reward has risen: its interval lies above 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rl_training.records.report import findings
from rl_training.records.report.series import Run
from rl_training.records.report.trends import MIN_STEPS, line_through
from rl_training.records.report.writing import MILLI, in_words
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

SPENT, LOST, STEADY, RISES, UNKNOWN = "spent", "lost", "steady", "rises", "unknown"
LEAST_NOW, MOST_NOW = 10, 50  # logged steps that are called now
ENOUGH = 0.5  # standard deviations of reward that a whole entropy must have bought at the least
STEADY_WITHIN = 0.5  # of the level: so much may a steady entropy have changed in the steps of now
NEXT_TO_NOTHING = 0.02  # of the level: a smaller change is none to act on, however sure it is
MOST_STARTS = 60  # of stretches that are looked at
PARTED = 0.3  # of forward: with half of forward − backward beyond it, forward says nothing
SAID = {
    SPENT: "Entropy is being spent on reward",
    LOST: "Entropy is being lost",
    STEADY: "Entropy is steady",
    RISES: "Entropy rises",
    UNKNOWN: "Whether entropy is being spent on reward or lost cannot be told yet",
}


@dataclass(frozen=True)
class Verdict:
    """What is said of entropy and reward.

    since            the first step of the stretch that it rests on
    entropy, reward  their changes by a step over it
    source           what `entropy` is: a line, a mean of what was measured, or of predictions
    why              why nothing can be said
    """

    kind: str
    since: int
    last: int
    entropy: Estimate
    reward: Estimate
    source: str
    why: str = ""

    @property
    def headline(self) -> str:
        return SAID[self.kind]

    @property
    def evidence(self) -> str:
        """The rest of the sentence: since when, and the intervals."""
        rates = [
            f"{what} by {in_words(rate, signed=True, times=MILLI)} thousandths{unit}"
            for what, rate, unit in (("entropy", self.entropy, " of a nat"), ("reward", self.reward, ""))
            if math.isfinite(rate.value)
        ]
        if not rates:
            return f": {self.why}."
        since = "" if self.kind == UNKNOWN else f" since step {self.since}"
        over = f"by the {self.source}, steps {self.since}–{self.last}"
        return f"{since}: a step changes {' and '.join(rates)} ({over}){f'. {self.why}' if self.why else ''}."


def entropy_now(run: Run) -> tuple[Estimate, int, str]:
    """Return entropy's change by a step now, the first step that it is of, and what it is.

    Of the line through the levels, the mean of what each step was measured to change, and the mean of what it was
    predicted to, that with the smallest interval: chosen by its width, and never by its value. Predictions are left out
    where forward and backward part: steps are too large for them then.
    """
    levels = run.token_entropy()
    window = min(max(len(levels) // 2, LEAST_NOW), MOST_NOW)
    recent = levels.tail(window)
    line = line_through(recent)
    known = [(line, int(recent.index[0]), "line through the logged steps")] if math.isfinite(line.stderr) else []
    means = {"mean of what each step was measured to change": findings.measured_by_one_step(run, "measured/delta_h")}
    if not predictions_part(run):
        means["mean of the predictions"] = run.known("delta_h/forward")
    for what, rows in means.items():
        mean = findings.mean_of_rows(rows.tail(window))
        if mean and math.isfinite(mean.stderr):
            known.append((mean, int(rows.tail(window).index[0]), what))
    if not known:
        return Estimate.missing(f"fewer than {MIN_STEPS} steps are logged, and no probe has measured one"), 0, ""
    return min(known, key=lambda pair: pair[0].half_width())


def predictions_part(run: Run) -> bool:
    """Return whether forward and backward of the same steps differ by more than their errors and by much."""
    apart = forward_and_backward(run)
    if apart is None:
        return False
    forward, half = apart
    return is_significant(half) and abs(half.value) > PARTED * abs(forward.value)


def forward_and_backward(run: Run) -> tuple[Estimate, Estimate] | None:
    """Return the mean of forward, and half of its mean difference from backward, over the last steps that have both."""
    forward, backward = run.known("delta_h/forward"), run.known("delta_h/backward")
    backward = backward.set_index(backward["about_step"].astype(int)) if len(backward) else backward
    steps = forward.index.intersection(backward.index)[-LEAST_NOW:]
    if steps.empty:
        return None
    ahead, behind = (findings.mean_of_rows(rows.loc[steps]) for rows in (forward, backward))
    assert ahead is not None
    assert behind is not None
    stderr = 0.5 * math.hypot(ahead.stderr, behind.stderr)
    half = Estimate(0.5 * (ahead.value - behind.value), stderr, min(ahead.num_samples, behind.num_samples))
    return ahead, half


def is_falling(run: Run) -> bool:
    """Return whether entropy falls significantly now; where nothing else is known, by the interventions' mean step."""
    now = entropy_now(run)[0]
    fall = now if math.isfinite(now.value) else run.last("intervention/plain_mean_delta_h")
    return fall is not None and fall.bounds()[1] < 0


def judge(run: Run) -> Verdict:
    """Return what there is to say of entropy and reward by the last logged step."""
    rewards, levels = run.logged("reward"), run.token_entropy()
    now, since, source = entropy_now(run)
    reward_now = line_through(rewards[rewards.index >= since])
    last = run.steps[-1]
    by_now = (since, last, now, reward_now, source)
    if math.isnan(now.value):
        return Verdict(UNKNOWN, *by_now, why=now.reason)
    is_enough = len(levels) >= MIN_STEPS
    level = abs(float(levels.tail(LEAST_NOW).mean())) if is_enough else 0.0
    reach = max(map(abs, now.bounds())) * max(last - since, 1)
    if is_enough and reach <= (NEXT_TO_NOTHING if is_significant(now) else STEADY_WITHIN) * level:
        return Verdict(STEADY, *by_now)
    if not is_significant(now):
        return Verdict(UNKNOWN, *by_now, why="The interval of entropy is still too wide")
    if now.value > 0:
        return Verdict(RISES, *by_now)
    still = _still_since(rewards, levels, _spread(run))
    if still:
        first, entropy, reward = still
        return Verdict(LOST, first, last, entropy, reward, "lines through the logged steps")
    spent = _rising_since(rewards, levels)
    if spent:
        first, entropy, reward = spent
        return Verdict(SPENT, first, last, entropy, reward, "lines through the logged steps")
    return Verdict(UNKNOWN, *by_now, why="Entropy falls; whether reward rises is not known yet")


Stretch = tuple[int, Estimate, Estimate]  # its first step, and the rates of entropy and reward


def _stretches(rewards: pd.Series[float], levels: pd.Series[float]) -> list[Stretch]:
    """Return the stretches up to the last step, the longest first."""
    steps = rewards.index.intersection(levels.index)
    most = len(steps) - MIN_STEPS + 1
    starts = np.unique(np.linspace(0, most - 1, max(min(most, MOST_STARTS), 0)).astype(int))
    parts = [(int(steps[start]), steps[start:]) for start in starts]
    return [(first, line_through(levels.loc[part]), line_through(rewards.loc[part])) for first, part in parts]


def _still_since(rewards: pd.Series[float], levels: pd.Series[float], spread: float) -> Stretch | None:
    """Return the longest stretch in which entropy falls and reward stands still; None without one."""
    for first, entropy, reward in _stretches(rewards, levels):
        part = levels[levels.index >= first]
        long = float(part.index[-1] - first)
        at_start = float(part.mean()) - 0.5 * long * entropy.value
        lost = -entropy.value * long / at_start if at_start > 0 else math.nan
        gained = max(reward.bounds()[1] * long, 0.0)  # at most
        if entropy.bounds()[1] < 0 and not reward.bounds()[0] > 0 and gained < ENOUGH * lost * spread + 1e-12:
            return first, entropy, reward
    return None


def _rising_since(rewards: pd.Series[float], levels: pd.Series[float]) -> Stretch | None:
    """Return the longest stretch in which entropy falls and reward rises; None without one."""
    for first, entropy, reward in _stretches(rewards, levels):
        if entropy.bounds()[1] < 0 and reward.bounds()[0] > 0:
            return first, entropy, reward
    return None


def _spread(run: Run) -> float:
    """Return the standard deviation of the rewards, the mean over steps; where TRL logs no other, within prompts."""
    single = [name for name in run.names("metrics.jsonl") if name.startswith("rewards/") and name.endswith("/std")]
    spread = run.logged(single[0] if len(single) == 1 else "reward_std")
    return float(spread.mean()) if len(spread) else 0.0
