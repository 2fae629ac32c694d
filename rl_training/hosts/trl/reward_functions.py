"""Reward functions whose errors name them: TRL calls several and does not say which one failed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from trl import GRPOTrainer

RewardFunction = Callable[..., Any]
OF_TRL = ("completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")  # no columns


def named_rewards(trainer: GRPOTrainer) -> list[Any]:
    """Returns the trainer's reward functions, each with errors that name it; reward models as they are."""
    functions = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    return [f if isinstance(f, nn.Module) else _named(f, f"reward function {name}") for f, name in functions]


def _named(function: RewardFunction, name: str) -> RewardFunction:
    """Returns this function, wrapped to raise a ValueError that names it for whatever goes wrong in it."""

    @functools.wraps(function)
    def checked(**given: Any) -> list[Any]:
        with _naming(function, name, given):
            rewards = function(**given)
        return _checked(rewards, name, len(given["completions"]))

    @functools.wraps(function)
    async def checked_later(**given: Any) -> list[Any]:
        with _naming(function, name, given):
            rewards = await function(**given)
        return _checked(rewards, name, len(given["completions"]))

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return checked_later if is_async else checked


@contextlib.contextmanager
def _naming(function: RewardFunction, name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """A context for a call of the function: whatever is raised in it names the function and the columns there are."""
    columns = ", ".join(key.replace("prompts", "prompt") for key in given if key not in OF_TRL)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.kind in by_name and p.default is p.empty]
    missing = [column for column in needed if column not in given]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}, and the data set has the columns {columns}")
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{name} raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno}); the data set has the "
            f"columns {columns}"
        ) from error


def _checked(rewards: Any, name: str, number: int) -> list[Any]:
    """Returns the rewards as a list. ValueError where they are not a number, or None, for each completion."""
    try:
        listed = list(rewards)
        for reward in listed:
            float(reward if reward is not None else 0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} returned {rewards!r:.80} instead of a list of numbers") from error
    if len(listed) != number:
        raise ValueError(f"{name} returned {len(listed)} rewards for {number} completions: return one for each")
    return listed
