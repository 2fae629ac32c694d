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
    return [f if isinstance(f, nn.Module) else _named(f, name) for f, name in functions]


def _named(function: RewardFunction, name: str) -> RewardFunction:
    @functools.wraps(function)
    def checked(**given: Any) -> list[float | None]:
        with _naming(name, given):
            return _numbers(function(**given), len(given["completions"]))

    @functools.wraps(function)
    async def checked_later(**given: Any) -> list[float | None]:
        with _naming(name, given):
            return _numbers(await function(**given), len(given["completions"]))

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return checked_later if is_async else checked


@contextlib.contextmanager
def _naming(name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """A context for a call: whatever fails in it is a ValueError with the function's name and the columns there are."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        columns = ", ".join(key.replace("prompts", "prompt") for key in given if key not in OF_TRL)
        raise ValueError(
            f"reward function {name} failed: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno}); the "
            f"data set has the columns {columns}"
        ) from error


def _numbers(rewards: Any, count: int) -> list[float | None]:
    numbers = [None if reward is None else float(reward) for reward in rewards]
    if len(numbers) != count:  # TRL would give all responses the one reward of an asynchronous function
        raise ValueError(f"it returned {len(numbers)} rewards for {count} completions")
    return numbers
