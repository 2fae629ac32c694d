"""The rewards of a run: of its reward functions, their weights and spread; on held-out prompts; the highest one."""

from __future__ import annotations

import math

import pandas as pd

from rl_training.options import is_number
from rl_training.records.report.set_up import set_up_of
from rl_training.records.table.series import LOGGED, Run
from rl_training.records.table.trends import MIN_STEPS

# What TRL logs of a reward function:
MEAN = "rewards/{}/mean"
STD = "rewards/{}/std"


def function_names(run: Run, logged: str = MEAN) -> list[str]:
    """Return the names of the reward functions of which the trainer logs this metric, in its order."""
    before, after = logged.split("{}")
    names = (name for name in run.names(LOGGED) if name.startswith(before) and name.endswith(after))
    return [name.removeprefix(before).removesuffix(after) for name in names]


def reward_functions(run: Run) -> dict[str, pd.Series[float]]:
    """Return the mean reward by step of each of the trainer's reward functions, by name."""
    return {name: run.logged(MEAN.format(name)) for name in function_names(run)}


def held_out_rewards(run: Run) -> dict[str, pd.DataFrame]:
    """Return the rewards on prompts that training never sees, by the evaluation that measured them.

    A loop that logs its metrics itself may have evaluated, too: it calls that reward eval_reward.
    """
    rewards = {f"evaluation {source.title}": run.finite_rows("reward", source) for source in run.evaluations_of_all}
    rewards["eval_reward of the log"] = run.finite_rows("eval_reward", LOGGED)
    return {label: rows for label, rows in rewards.items() if len(rows)}


def reward_weights(run: Run) -> dict[str, float]:
    """Return the weight of each of the trainer's reward functions, by name; empty if no weights are recorded."""
    set_up = set_up_of(run)
    weights = set_up.trainer("reward_weights")
    recorded = set_up.recorded("data", "rewards")
    names = recorded if isinstance(recorded, list) else [*reward_functions(run)]  # logged in the trainer's order
    if not isinstance(weights, list) or len(weights) != len(names):
        return {}
    return {str(name): float(weight) for name, weight in zip(names, weights, strict=True) if is_number(weight)}


def is_penalty(run: Run, name: str) -> bool:
    """Return whether a reward function has a negative weight, or, by its means and scatter, no value above 0.

    A mean m < 0 alone does not tell: rewards of ±1 have one. Their variance is above −m (1 + m), the most that values
    between −1 and 0 can have; and two standard deviations above the mean are above 0.
    """
    if reward_weights(run).get(name, 0.0) < 0:
        return True
    means = run.logged(MEAN.format(name))
    if means.empty or means.max() > 0 or means.min() == 0:
        return False
    spread = run.logged(STD.format(name)).head(MIN_STEPS)
    if spread.empty:
        return True
    mean = float(means.head(MIN_STEPS).mean())
    deviation = float(spread.mean())
    return mean + 2 * deviation <= 0 or deviation**2 <= 1.1 * -mean * (1 + mean)


def spreads(run: Run) -> pd.Series[float]:
    """Return the standard deviation of all rewards, by step; within prompts if TRL logs no other."""
    names = function_names(run, STD)
    return run.logged(STD.format(names[0]) if len(names) == 1 else "reward_std")


def spread_of_rewards(run: Run) -> float:
    """Return the standard deviation of single rewards: the mean over the better half of the steps."""
    spread = spreads(run)
    return float(spread[spread >= spread.median()].mean()) if len(spread) else 0.0


def spread_of_function(run: Run, name: str, otherwise: float) -> float:
    spread = run.logged(STD.format(name))
    return float(spread[spread >= spread.median()].mean()) if len(spread) else otherwise


def highest_reward(rewards: pd.Series[float], parts: dict[str, pd.Series[float]], weights: dict[str, float]) -> float:
    """Return the highest possible reward: the sum of weights, if all rewards lie in [0, 1]; else nan."""
    curves = parts.values() or [rewards]
    if any(len(curve) and not (curve.min() >= 0 and curve.max() <= 1 + 1e-6) for curve in curves):
        return math.nan
    if parts and parts.keys() <= weights.keys():
        return sum(max(weights[name], 0.0) for name in parts)
    return float(max(len(parts), 1))
