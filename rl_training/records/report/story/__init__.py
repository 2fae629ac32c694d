"""What a run has done so far: its curves of reward and entropy, without their noise.

broken_line.py        a curve without its noise
noise.py, pieces.py   how: the size of the noise, and the straight pieces that are left
levels.py             the numbers at both ends of a run
curves.py             what a curve does now, and how far it has come
fall.py               how far it lies below its best, and since when
reward_functions.py   which rewards there are
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from rl_training.records.report.story.curves import MIN_FALL_OF_PART, Entropy, Reward, read_entropy, read_reward
from rl_training.records.report.story.levels import Levels, levels_of
from rl_training.records.report.story.reward_functions import (
    held_out_rewards,
    highest_reward,
    is_penalty,
    reward_functions,
    reward_weights,
    spread_of_function,
    spread_of_rewards,
)
from rl_training.records.table.measured import REWARD_SUM
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate


@dataclass(frozen=True)
class Story:
    """The curves of a run.

    Args:
        reward, entropy: The paid reward and token entropy; None for too few values.
        functions: Of several reward functions, paid or watched (weight 0), those with enough values.
        held_out: Rewards on prompts that training never sees, one for each evaluation with enough values.
        reward_levels, entropy_levels: The numbers at both ends of the run, however short; None without a value.
        function_levels: The same of each reward function, by name.
        effects: Sums of what the steps were measured to do to the paid reward, by step; empty if that was not measured.
        first, last: Logged steps.
        logged: Number of logged steps.
    """

    reward: Reward | None
    entropy: Entropy | None
    functions: list[Reward]
    held_out: list[Reward]
    reward_levels: Levels | None
    entropy_levels: Levels | None
    function_levels: Mapping[str, Levels]
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
        return self.entropy_levels is not None and not self.entropy_levels.start > 0

    @property
    def whole_effect(self) -> Estimate | None:
        """What the measured steps did to the paid reward in all; None if no step was measured."""
        effects = [effect for effect in self.effects.values() if math.isfinite(effect.stderr)]
        return effects[-1] if effects else None

    def effect_since(self, step: int) -> Estimate:
        """Return what the steps from this one on were measured to do to the paid reward; nan if some were not."""
        before = self.effects.get(step)
        now = next(reversed(self.effects.values()), None)
        if now is None or now.reason:  # which names the steps that it lacks
            return Estimate.missing("not all steps were measured")
        if before is None or math.isnan(before.value):
            return now if step <= self.first else Estimate.missing("where it began is not known")
        variance = now.stderr**2 - before.stderr**2  # batches are independent
        return Estimate(now.value - before.value, math.sqrt(variance) if variance > 0 else math.nan, now.num_samples)

    @classmethod
    def of(cls, run: Run) -> Story:
        """Return the story of a run, up to its last logged step."""
        rewards = run.logged("reward")
        entropies = run.token_entropy()
        spread = spread_of_rewards(run)
        parts = reward_functions(run)
        top = highest_reward(rewards, parts, reward_weights(run))
        reward = read_reward("reward", rewards, spread, top)
        entropy = read_entropy(entropies)
        curves = {name: _function_curve(run, name, values) for name, values in parts.items()} if len(parts) > 1 else {}
        function_levels = {name: _levels(values, curves.get(name)) for name, values in parts.items()}
        held_out = [
            read_reward("held-out reward", rows["value"], spread, top) for rows in held_out_rewards(run).values()
        ]
        return cls(
            reward=reward,
            entropy=entropy,
            functions=[curve for curve in curves.values() if curve is not None],
            held_out=[curve for curve in held_out if curve is not None],
            reward_levels=_levels(rewards, reward),
            entropy_levels=_levels(entropies, entropy),
            function_levels={name: levels for name, levels in function_levels.items() if levels is not None},
            effects=run.estimates(REWARD_SUM),
            first=run.steps[0],
            last=run.steps[-1],
            logged=len(run.steps),
        )


def _levels(values: pd.Series[float], curve: Reward | Entropy | None) -> Levels | None:
    """Return the levels of a number at both ends of the run, by its curve if it has one; None without a value."""
    if curve is not None:
        return curve.levels
    return levels_of(values, None) if len(values) else None


def _function_curve(run: Run, name: str, values: pd.Series[float]) -> Reward | None:
    """Return the curve of one of several reward functions; None for too few values."""
    spread = spread_of_function(run, name, spread_of_rewards(run))
    curve = read_reward(name, values, spread, math.nan, MIN_FALL_OF_PART)
    if curve is None:
        return None
    return replace(curve, is_penalty=is_penalty(run, name), weight=reward_weights(run).get(name, math.nan))
