"""Errors of reward functions: a note names the function, which TRL does not, and rewards must be finite."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from trl import GRPOTrainer

from rl_training.errors import UserError, add_note_on_error

RewardFunction = Callable[..., Any]
# Arguments that TRL passes to reward functions and that are not columns of the data set.
TRL_ARGUMENTS = ("completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


@contextlib.contextmanager
def named_rewards(trainer: GRPOTrainer) -> Iterator[None]:
    """Wrap the trainer's reward functions inside this context, so that errors name them. Reward models are unchanged.

    Not longer than that: the user may change the trainer's list, or the functions in it, at any time.
    """
    functions = trainer.reward_funcs
    names = trainer.reward_func_names
    if len(functions) != len(names):  # TRL's own error is the right one
        yield
        return
    named_functions = [
        function if isinstance(function, nn.Module) else _named(function, name)
        for function, name in zip(functions, names, strict=True)
    ]
    trainer.reward_funcs = named_functions
    try:
        yield
    finally:
        if trainer.reward_funcs is named_functions:
            trainer.reward_funcs = functions


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


def refuse_infinite_rewards(trainer: GRPOTrainer, rewards: Tensor, completions: Sequence[Any]) -> None:
    """Raise UserError for a sequence without a finite reward.

    Args:
        trainer: The trainer.
        rewards: (sequences of all ranks, reward functions), nan where a function returned None.
        completions: Those of this rank.
    """
    is_invalid = rewards.isinf().any(dim=1) | rewards.isnan().all(dim=1)
    if is_invalid.any():
        row = int(is_invalid.nonzero()[0])
        values = dict(zip(trainer.reward_func_names, rewards[row].tolist(), strict=True))
        local_row = row - trainer.accelerator.process_index * len(completions)
        where = f" for completion {completions[local_row]!r}" if 0 <= local_row < len(completions) else ""
        raise UserError(
            f"step {trainer.state.global_step + 1}: {int(is_invalid.sum())} of {len(rewards)} rewards are not finite: "
            f"the first is {values}{where}. A reward function must return a finite number for every completion."
        )
