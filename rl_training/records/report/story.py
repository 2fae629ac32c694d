"""What a run has done so far: where reward and entropy started, where they are, and which way they go.

Each curve is read from its broken line (broken_line.py), which alone decides what is noise. Here is only what matters:
sizes of changes, in standard deviations of the rewards and in shares of the first entropy. "Now" is the last quarter of
the run, however long it is. `Levels` is the one place where a report takes the numbers at both ends of a run from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report import findings
from rl_training.records.report.broken_line import MIN_PIECE, BrokenLine, broken_line
from rl_training.records.report.series import Run
from rl_training.records.report.set_up import SetUp
from rl_training.records.report.trends import MIN_STEPS
from rl_training.records.report.writing import level, plus_minus, steps_of
from rl_training.statistics.estimate import Estimate

REWARD_SUM = "measured/cumulative_reward"
NOW = 0.75  # share of the run at which the present begins
FALL = 0.15  # standard deviations of the rewards: a smaller fall does not matter
FALL_OF_TOP = 0.05  # of the highest possible reward: likewise
FALL_OF_PART = 0.25  # a fall that matters in one of several reward functions, whose weights are a matter of choice
RISE = 0.05  # standard deviations, over the last quarter: reward rises
BAND = 0.1  # standard deviations: a smaller rise is none
MIN_DEVIATIONS = 2.5  # standard errors that a fall must have
LEFT_OF_FIRST = 0.5  # share of the first value; with less left, the first step may have broken the policy
LOST_FROM_FIRST = 0.15  # of the highest possible reward, or standard deviations if that is unknown; likewise
MIN_DEVIATIONS_OF_FIRST = 4.5  # standard deviations by which the first value must lie above all others to be the best
OSCILLATES = 2  # times that a curve recovered from such a dip: one more is no news
AS_DEEP = 2 / 3  # of the present fall: such a dip
CHANGE = 0.03  # share of entropy, over the last quarter: it falls or rises
LEAST_CHANGE = 0.01  # of the first entropy, likewise
FIRST_STEPS = 5  # logged steps whose mean is the level at the start; in short runs one in twenty
FLOOR = 1e-3  # of the first entropy: less is as good as nothing


@dataclass(frozen=True)
class Levels:
    """A logged number at both ends of a run, as the headline and the table show it.

    Args:
        start: Mean of the first logged steps.
        now: The level at the last step, within the range of the values; None if there is only one value.
        error: Standard error of `now`; nan if unknown.
        window: The steps that they cover, in words.
    """

    start: float
    now: float | None
    error: float
    window: str

    @property
    def text(self) -> str:
        if self.now is None:
            return level(self.start)
        now = plus_minus(self.now, 2 * self.error) if self.error > 0 else level(self.now)
        return f"{level(self.start)} → {now}"


def levels_of(values: pd.Series[float], line: BrokenLine | None, error: float = math.nan) -> Levels:
    """Return the levels of a number with at least one value; without a line, the means of its first and last values.

    Args:
        values: Finite values by step.
        line: Their broken line, if there are enough of them for one.
        error: Standard error of its last level, if it is not `line.now_error`.
    """
    if line is None:
        (start, *first), *rest = findings.first_and_last_means(values)
        if not rest:
            return Levels(start, None, math.nan, f"step {first[0]} alone")
        now, *last = rest[0]
        at = f"steps {first[0]} and {last[0]}"
        if first[0] < first[1]:
            at = f"means of steps {first[0]}–{first[1]} and {last[0]}–{last[1]}"
        return Levels(start, now, math.nan, at)
    head = first_values(values)
    at = f"mean of {steps_of(head)}" if len(head) > 1 else steps_of(head)
    window = f"{at} → smoothed level at step {line.last}, ± two standard errors"
    now = min(max(line.now, float(values.min())), float(values.max()))  # a line's end may lie beyond all values
    return Levels(float(head.mean()), now, line.now_error if math.isnan(error) else error, window)


def first_values(values: pd.Series[float]) -> pd.Series[float]:
    """Return the values of the first logged steps, whose mean is the level at the start."""
    return values.head(min(FIRST_STEPS, max(len(values) // 20, 1)))


@dataclass(frozen=True)
class Reward:
    """A curve of rewards.

    Args:
        name: "reward", the name of a reward function, or "held-out reward".
        line: Its broken line.
        spread: Standard deviation of single rewards.
        top: The highest possible value; nan if unknown.
        fall: By how much it lies below its best, if that matters; otherwise 0.
        since: Step since which it has fallen; the last step if it has not.
        best: Its best level, within the range of its values.
        levels: Its levels at both ends.
        is_penalty: Whether it is a reward function with a negative weight, or without a positive value: its falls say
            that it is incurred, not that something good was lost.
        weight: Of a reward function; nan if it is not recorded.
    """

    name: str
    line: BrokenLine
    spread: float
    top: float
    fall: float
    since: int
    best: float
    levels: Levels
    is_penalty: bool = False
    weight: float = math.nan

    @property
    def start(self) -> float:
        return self.levels.start

    @property
    def now(self) -> float:
        return self.line.now

    @property
    def rises(self) -> bool:
        """Whether it has risen in the last quarter by what matters, and has not fallen."""
        return not self.fall and self.now - self.line.at(NOW) > RISE * self.spread

    @property
    def has_risen(self) -> bool:
        """Whether it lies above its start by as much as a fall that matters."""
        return self.now - self.start > FALL * self.spread

    def is_at_ceiling(self, share: float) -> bool:
        """Return whether it is within this share of the highest possible reward; False if that is unknown."""
        return self.now >= share * self.top

    @property
    def stands_from(self) -> int:
        """The first bin since which it has not risen by more than BAND."""
        band = max(BAND * self.spread, 2 * self.line.now_error)
        return self.line.since(self.line.fitted >= self.now - band) or 0

    def gain_since(self, place: int) -> float:
        """Return the upper end of its change since a bin."""
        change, error = self.line.slope(place)
        return max(change + 2 * error, 0.0)


@dataclass(frozen=True)
class Entropy:
    """The curve of token entropy, in nats."""

    line: BrokenLine
    levels: Levels

    @property
    def start(self) -> float:
        return self.levels.start

    @property
    def now(self) -> float:
        return self.line.now

    @property
    def left(self) -> float:
        """Share of the first entropy that is left."""
        return self.now / self.start

    @property
    def change(self) -> float:
        """Change over the last quarter, as a share of the level before; 0 if it does not matter."""
        before = self.line.at(NOW)
        change = self.now - before
        matters = abs(change) > max(LEAST_CHANGE * self.start, CHANGE * before)
        is_news = not _oscillates(math.copysign(1.0, change) * self.line.smooth(), abs(change))
        return change / before if matters and is_news else 0.0

    @property
    def reach(self) -> float:
        """Largest change that the last half allows, as a share of the level."""
        change, error = self.line.slope(len(self.line.values) // 2)
        return math.expm1(min(abs(change) + 2 * error, 50.0))

    @property
    def highest_at(self) -> int:
        """The step at which it was highest, and from which on it was lost."""
        return self.line.step(int(self.line.fitted.argmax()))

    def since_below(self, share: float) -> int:
        """Return the step since which less than a share of the first entropy is left."""
        place = self.line.since(self.line.fitted < share * self.start)
        return self.line.step(place if place is not None else len(self.line.steps) - 1)

    def lost_since(self, step: int) -> float:
        """Return the share of entropy that was lost since a step."""
        place = max(int(np.searchsorted(self.line.steps, step, side="right")) - 1, 0)
        return 1 - self.now / max(float(self.line.fitted[place]), self.now)


@dataclass(frozen=True)
class Story:
    """The curves of a run. `reward` and `entropy` are None for too few values.

    Args:
        functions: Of several reward functions, paid or watched (weight 0), those with enough values.
        levels: The numbers at both ends of the run, however short: by "reward", "token entropy" and names of functions.
        effects: Sums of what the steps were measured to do to the paid reward, by step; empty if that was not measured.
        first, last: Logged steps.
        logged: Number of logged steps.
    """

    reward: Reward | None
    entropy: Entropy | None
    functions: list[Reward]
    held_out: list[Reward]
    levels: Mapping[str, Levels]
    effects: dict[int, Estimate]
    first: int
    last: int
    logged: int

    @property
    def parts(self) -> list[Reward]:
        """The reward functions that are not meant to fall."""
        return [function for function in self.functions if not function.is_penalty]

    @property
    def starts_without_entropy(self) -> bool:
        """Whether the first steps' mean entropy is not above 0."""
        return "token entropy" in self.levels and not self.levels["token entropy"].start > 0

    def effect_since(self, step: int) -> Estimate:
        """Return what the steps from this one on were measured to do to the paid reward; nan if some were not."""
        before, now = self.effects.get(step), next(reversed(self.effects.values()), None)
        if now is None or now.reason:  # which names the steps that it lacks
            return Estimate.missing("not all steps were measured")
        if before is None or math.isnan(before.value):
            return now if step <= self.first else Estimate.missing("where it began is not known")
        variance = now.stderr**2 - before.stderr**2  # batches are independent
        return Estimate(now.value - before.value, math.sqrt(variance) if variance > 0 else math.nan, now.num_samples)

    @classmethod
    def of(cls, run: Run) -> Story:
        rewards, entropies, spread = run.logged("reward"), run.token_entropy(), _spread(run)
        parts, weights = reward_functions(run), reward_weights(run)
        top = _top(rewards, parts, weights)
        reward, entropy = read_reward("reward", rewards, spread, top), read_entropy(entropies)
        functions = [
            replace(function, is_penalty=is_penalty(run, function.name), weight=weights.get(function.name, math.nan))
            for function in _known(
                read_reward(name, part, _own_spread(run, name, spread), math.nan, FALL_OF_PART)
                for name, part in (parts.items() if len(parts) > 1 else ())
            )
        ]
        curves = {"reward": reward, "token entropy": entropy, **{curve.name: curve for curve in functions}}
        series = {"reward": rewards, "token entropy": entropies, **parts}
        levels = {
            name: curve.levels if (curve := curves.get(name)) else levels_of(values, None)
            for name, values in series.items()
            if len(values)
        }
        held_out = _known(read_reward("held-out reward", part, spread, top) for part in _held_out(run))
        effects, steps = run.estimates(REWARD_SUM), run.steps
        return cls(reward, entropy, functions, held_out, levels, effects, steps[0], steps[-1], len(steps))


def _known(curves: Iterable[Reward | None]) -> list[Reward]:
    return [curve for curve in curves if curve is not None]


def read_reward(name: str, values: pd.Series[float], spread: float, top: float, matters: float = FALL) -> Reward | None:
    """Return what a curve of rewards does; None for too few values."""
    line = broken_line(values)
    if line is None:
        return None
    if not spread > 0:
        spread = max(4 * line.noise, float(np.ptp(line.fitted)))
    smooth, levels = line.smooth(), levels_of(values, line)
    untrained = _untrained(values, line, top if math.isfinite(top) else spread)
    best, highest = max(float(smooth.max()), line.start, untrained), float(values.max())
    fall = best - line.now
    least = max(matters * spread, MIN_DEVIATIONS * line.now_error, FALL_OF_TOP * top if math.isfinite(top) else 0.0)
    if not fall > least or _oscillates(-smooth, fall):
        return Reward(name, line, spread, top, 0.0, line.last, min(best, highest), levels)
    if best == untrained:
        return Reward(name, line, spread, top, fall, int(values.index[1]), best, levels)
    since = line.since(line.fitted < line.now + 0.9 * fall) or 0
    first = (
        float(line.values[: max(since, 1)].mean()) if since < MIN_PIECE else best
    )  # before a fall in the first steps
    return Reward(name, line, spread, top, fall, line.step(since), min(max(best, first), highest), levels)


def _untrained(values: pd.Series[float], line: BrokenLine, most: float) -> float:
    """Return the first value if what follows is so much lower that the first step must have broken the policy.

    Otherwise −inf. No piece of the line is that short, so the line does not show it. Much must be gone, since one value
    may be an outlier, or a lucky response where hardly any earns a reward.
    """
    first, others = float(values.iloc[0]), values.iloc[1:]
    noise = line.noise * math.sqrt(len(values) / len(line.values))  # of one value
    is_above = first - float(others.max()) > MIN_DEVIATIONS_OF_FIRST * noise
    is_lost = line.now < LEFT_OF_FIRST * first and first - line.now > LOST_FROM_FIRST * most
    return first if is_above and is_lost else -math.inf


def read_entropy(entropies: pd.Series[float]) -> Entropy | None:
    """Return what entropy does; None for too few values, or if it starts at 0."""
    start = float(first_values(entropies).mean()) if len(entropies) else 0.0
    line = broken_line(entropies.clip(lower=FLOOR * start), logarithmic=True) if start > 0 else None
    return Entropy(line, levels_of(entropies, line, line.now_error * line.now)) if line else None


def _oscillates(curve: np.ndarray, size: float) -> bool:
    """Return whether a curve has already come back several times from nearly as large a rise (with −: from a dip)."""
    left, right = np.minimum.accumulate(curve), np.minimum.accumulate(curve[::-1])[::-1]
    above = curve - np.maximum(left, right) > AS_DEEP * size
    return int((np.diff(above.astype(int)) == 1).sum()) + int(above[0]) >= OSCILLATES


def _spread(run: Run) -> float:
    """Return the standard deviation of single rewards: the mean over the better half of the steps."""
    names = [name for name in run.names(METRICS_FILE) if name.startswith("rewards/") and name.endswith("/std")]
    spread = run.logged(names[0] if len(names) == 1 else "reward_std")
    return float(spread[spread >= spread.median()].mean()) if len(spread) else 0.0


def _own_spread(run: Run, name: str, otherwise: float) -> float:
    spread = run.logged(f"rewards/{name}/std")
    return float(spread[spread >= spread.median()].mean()) if len(spread) else otherwise


def reward_functions(run: Run) -> dict[str, pd.Series[float]]:
    """Return the mean reward by step of each of the trainer's reward functions, by name."""
    names = [name for name in run.names(METRICS_FILE) if name.startswith("rewards/") and name.endswith("/mean")]
    return {name.removeprefix("rewards/").removesuffix("/mean"): run.logged(name) for name in names}


def reward_weights(run: Run) -> dict[str, float]:
    """Return the weight of each of the trainer's reward functions, by name; empty if no weights are recorded."""
    set_up = SetUp.of(run)
    data, weights = set_up.settings.get("data"), set_up.trainer("reward_weights")
    recorded = data.get("rewards") if isinstance(data, dict) else None
    names = recorded if isinstance(recorded, list) else [*reward_functions(run)]  # logged in the trainer's order
    if not isinstance(weights, list) or len(weights) != len(names):
        return {}
    return {str(name): float(weight) for name, weight in zip(names, weights, strict=True) if _is_number(weight)}


def is_penalty(run: Run, name: str) -> bool:
    """Return whether a reward function has a negative weight, or, by its means and scatter, no value above 0.

    A mean m < 0 alone does not tell: rewards of ±1 have one. Their variance is above −m (1 + m), the most that values
    between −1 and 0 can have; and two standard deviations above the mean are above 0.
    """
    if reward_weights(run).get(name, 0.0) < 0:
        return True
    means = run.logged(f"rewards/{name}/mean")
    if means.empty or means.max() > 0 or means.min() == 0:
        return False
    spread = run.logged(f"rewards/{name}/std").head(MIN_STEPS)
    if spread.empty:
        return True
    mean, deviation = float(means.head(MIN_STEPS).mean()), float(spread.mean())
    return mean + 2 * deviation <= 0 or deviation**2 <= 1.1 * -mean * (1 + mean)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _held_out(run: Run) -> list[pd.Series[float]]:
    rows = [rows["value"] for rows in findings.held_out_rewards(run).values()]
    return [values for values in (run.logged("eval_reward"), *rows) if len(values)]


def _top(rewards: pd.Series[float], parts: dict[str, pd.Series[float]], weights: dict[str, float]) -> float:
    """Return the highest possible reward: the sum of weights, if all rewards lie in [0, 1]; else nan."""
    curves = parts.values() if len(parts) > 1 else [rewards]
    if any(len(curve) and not (curve.min() >= 0 and curve.max() <= 1 + 1e-6) for curve in curves):
        return math.nan
    if len(parts) > 1 and parts.keys() <= weights.keys():
        return sum(max(weights[name], 0.0) for name in parts)
    return float(max(len(parts), 1))
