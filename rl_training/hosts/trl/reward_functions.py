"""Adds a note to the errors of reward functions that names the function: TRL does not say which one failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from trl import GRPOTrainer

from rl_training.errors import add_note_on_error

RewardFunction = Callable[..., Any]
# Arguments that TRL passes to reward functions and that are not columns of the data set.
TRL_ARGUMENTS = ("completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


def named_rewards(trainer: GRPOTrainer) -> list[Any]:
    """Return the trainer's reward functions, wrapped so that errors name them. Reward models are unchanged."""
    functions = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    return [f if isinstance(f, nn.Module) else _named(f, name) for f, name in functions]


def _named(function: RewardFunction, name: str) -> RewardFunction:
    """Wrap a reward function. TRL itself checks the number of rewards, and names the function in that error."""
    what = f"reward function {name}"

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> list[float | None]:
        with add_note_on_error(what, functools.partial(_columns, kwargs)):
            return _numbers(function(*args, **kwargs))

    @functools.wraps(function)
    async def checked_async(*args: Any, **kwargs: Any) -> list[float | None]:
        with add_note_on_error(what, functools.partial(_columns, kwargs)):
            return _numbers(await function(*args, **kwargs))

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return checked_async if is_async else checked


def _columns(arguments: Mapping[str, Any]) -> str:
    columns = [key.replace("prompts", "prompt") for key in arguments if key not in TRL_ARGUMENTS]
    return f"; the data set has the columns {', '.join(columns)}" if "completions" in arguments else ""


def _numbers(rewards: Iterable[Any]) -> list[float | None]:
    return [None if reward is None else float(reward) for reward in rewards]
