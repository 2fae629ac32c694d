"""Is entropy being spent on reward, or lost? The verdict that a report opens with, and the intervals that support it.

Entropy *falls* if the 95 % interval of its present rate (`entropy_now`) lies below 0. That rate covers the last half of
the run, but at least 10 and at most 50 logged steps. Longer stretches, up to the last step, are fitted with lines
(trends.py). Falling entropy is

lost    if, over some stretch in which it falls, reward stands still: the interval of reward's slope is not above 0, and
        its upper end allows a gain, in standard deviations of the rewards, below MIN_REWARD_GAIN times the share of
        entropy lost
spent   otherwise, if over some stretch in which it falls the interval of reward's slope lies above 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rl_training.records.report import findings
from rl_training.records.report.series import Run
from rl_training.records.report.trends import MIN_STEPS, line_through
from rl_training.records.report.writing import MILLI, format_estimate
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import is_significant

SPENT, LOST, STEADY, RISES, UNKNOWN = "spent", "lost", "steady", "rises", "unknown"
MIN_RECENT_STEPS, MAX_RECENT_STEPS = 10, 50  # least and largest number of logged steps that count as now
MIN_REWARD_GAIN = 0.5  # least gain in reward for all of the entropy, in standard deviations
STEADY_WITHIN = 0.5  # of the level: largest possible change now of a steady entropy
NEGLIGIBLE_CHANGE = 0.02  # of the level: a smaller change is steady, even if it is significant
MAX_STARTS = 60  # number of stretches that are tried
MAX_HALF_DIFFERENCE = 0.3  # of forward: if half of forward − backward is larger, forward is not used
HEADLINES = {
    SPENT: "Entropy is being spent on reward",
    LOST: "Entropy is being lost",
    STEADY: "Entropy is steady",
    RISES: "Entropy rises",
    UNKNOWN: "Whether entropy is being spent on reward or lost cannot be told yet",
}


@dataclass(frozen=True)
class Verdict:
    """What a report says of entropy and reward.

    Args:
        kind: SPENT, LOST, STEADY, RISES or UNKNOWN.
        since: First step of the stretch that it is based on.
        last: Last logged step.
        entropy, reward: Their changes per step over that stretch.
        source: What `entropy` is: a line, or a mean of measurements or of predictions.
        why: Why nothing more can be said.
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
        return HEADLINES[self.kind]

    @property
    def evidence(self) -> str:
        """The rest of the sentence: since which step, and the intervals."""
        rates = [
            f"{what} by {format_estimate(rate, signed=True, times=MILLI)} thousandths{unit}"
            for what, rate, unit in (("entropy", self.entropy, " of a nat"), ("reward", self.reward, ""))
            if math.isfinite(rate.value)
        ]
        if not rates:
            return f": {self.why}."
        since = "" if self.kind == UNKNOWN else f" since step {self.since}"
        over = f"by the {self.source}, steps {self.since}–{self.last}"
        return f"{since}: a step changes {' and '.join(rates)} ({over}){f'. {self.why}' if self.why else ''}."


def entropy_now(run: Run) -> tuple[Estimate, int, str]:
    """Return entropy's present change per step, the first step that it covers, and its source.

    Of the line through the levels, the mean measured change and the mean predicted change it is the one with the
    narrowest interval; the value never decides. Predictions are left out if forward and backward differ too much,
    because steps are then too large for them.
    """
    levels = run.token_entropy()
    window = min(max(len(levels) // 2, MIN_RECENT_STEPS), MAX_RECENT_STEPS)
    recent = levels.tail(window)
    line = line_through(recent)
    candidates = [(line, int(recent.index[0]), "line through the logged steps")] if math.isfinite(line.stderr) else []
    means = {"mean of what each step was measured to change": findings.measured_by_one_step(run, "measured/delta_h")}
    if not predictions_disagree(run):
        means["mean of the predictions"] = run.finite_rows("delta_h/forward")
    for what, rows in means.items():
        mean = findings.mean_of_rows(rows.tail(window))
        if mean and math.isfinite(mean.stderr):
            candidates.append((mean, int(rows.tail(window).index[0]), what))
    if not candidates:
        return Estimate.missing(f"fewer than {MIN_STEPS} steps are logged, and no probe has measured one"), 0, ""
    return min(candidates, key=lambda pair: pair[0].half_width())


def predictions_disagree(run: Run) -> bool:
    """Return whether forward and backward of the same steps differ significantly and by more than is allowed."""
    predictions = forward_and_backward(run)
    if predictions is None:
        return False
    forward, half = predictions
    return is_significant(half) and abs(half.value) > MAX_HALF_DIFFERENCE * abs(forward.value)


def forward_and_backward(run: Run) -> tuple[Estimate, Estimate] | None:
    """Return the mean of forward, and half of its mean difference from backward, over the last steps that have both."""
    forward, backward = run.finite_rows("delta_h/forward"), run.finite_rows("delta_h/backward")
    backward = backward.set_index(backward["about_step"].astype(int)) if len(backward) else backward
    steps = forward.index.intersection(backward.index)[-MIN_RECENT_STEPS:]
    if steps.empty:
        return None
    ahead, behind = (findings.mean_of_rows(rows.loc[steps]) for rows in (forward, backward))
    assert ahead is not None
    assert behind is not None
    stderr = 0.5 * math.hypot(ahead.stderr, behind.stderr)
    half = Estimate(0.5 * (ahead.value - behind.value), stderr, min(ahead.num_samples, behind.num_samples))
    return ahead, half


def is_falling(run: Run) -> bool:
    """Return whether entropy now falls significantly. If its rate is unknown, the interventions' plain step decides."""
    now = entropy_now(run)[0]
    fall = now if math.isfinite(now.value) else run.last("intervention/plain_mean_delta_h")
    return fall is not None and fall.bounds()[1] < 0


def judge(run: Run) -> Verdict:
    """Return the verdict on entropy and reward up to the last logged step."""
    rewards, levels = run.logged("reward"), run.token_entropy()
    now, since, source = entropy_now(run)
    reward_now = line_through(rewards[rewards.index >= since])
    last = run.steps[-1]
    by_now = (since, last, now, reward_now, source)
    if math.isnan(now.value):
        return Verdict(UNKNOWN, *by_now, why=now.reason)
    is_enough = len(levels) >= MIN_STEPS
    level = abs(float(levels.tail(MIN_RECENT_STEPS).mean())) if is_enough else 0.0
    reach = max(map(abs, now.bounds())) * max(last - since, 1)
    if is_enough and reach <= (NEGLIGIBLE_CHANGE if is_significant(now) else STEADY_WITHIN) * level:
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


Stretch = tuple[int, Estimate, Estimate]  # first step, and slopes of entropy and reward


def _stretches(rewards: pd.Series[float], levels: pd.Series[float]) -> list[Stretch]:
    """Return stretches that end at the last step, the longest first."""
    steps = rewards.index.intersection(levels.index)
    most = len(steps) - MIN_STEPS + 1
    starts = np.unique(np.linspace(0, most - 1, max(min(most, MAX_STARTS), 0)).astype(int))
    parts = [(int(steps[start]), steps[start:]) for start in starts]
    return [(first, line_through(levels.loc[part]), line_through(rewards.loc[part])) for first, part in parts]


def _still_since(rewards: pd.Series[float], levels: pd.Series[float], spread: float) -> Stretch | None:
    """Return the longest stretch in which entropy falls and reward stands still, or None."""
    for first, entropy, reward in _stretches(rewards, levels):
        part = levels[levels.index >= first]
        long = float(part.index[-1] - first)
        at_start = float(part.mean()) - 0.5 * long * entropy.value
        lost = -entropy.value * long / at_start if at_start > 0 else math.nan
        gained = max(reward.bounds()[1] * long, 0.0)  # upper bound
        if entropy.bounds()[1] < 0 and not reward.bounds()[0] > 0 and gained < MIN_REWARD_GAIN * lost * spread + 1e-12:
            return first, entropy, reward
    return None


def _rising_since(rewards: pd.Series[float], levels: pd.Series[float]) -> Stretch | None:
    """Return the longest stretch in which entropy falls and reward rises, or None."""
    for first, entropy, reward in _stretches(rewards, levels):
        if entropy.bounds()[1] < 0 and reward.bounds()[0] > 0:
            return first, entropy, reward
    return None


def _spread(run: Run) -> float:
    """Return the standard deviation of the rewards, as a mean over steps; within prompts if TRL logs no other."""
    single = [name for name in run.names("metrics.jsonl") if name.startswith("rewards/") and name.endswith("/std")]
    spread = run.logged(single[0] if len(single) == 1 else "reward_std")
    return float(spread.mean()) if len(spread) else 0.0
