"""What one process decides for all: the folder to write to, or that there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from rl_training.errors import UserError
from rl_training.parallel.ranks import all_ranks

Result = TypeVar("Result")


def on_first_rank(work: Callable[[], Result], device: torch.device) -> Result:
    """Call a function on rank 0, and return its result on all ranks. Collective.

    Args:
        work: The function. Its result can be pickled.
        device: Device for the communication.

    Raises:
        UserError: On all ranks, if the function raised one.
        RuntimeError: On the other ranks, if the function raised any other exception.
    """
    ranks = all_ranks()
    result, failure = None, None
    if ranks.number == 0:
        try:
            result = work()
        except Exception as error:
            failure = error
    if ranks.count > 1:
        said: list[Any] = [result, None if failure is None else _as_seen_by_others(failure)]
        dist.broadcast_object_list(said, src=0, device=device)
        result, failure = said[0], failure or said[1]
    if failure is not None:
        raise failure
    return cast(Result, result)


def _as_seen_by_others(error: Exception) -> Exception:
    """Return what the other ranks raise: an exception that can be sent, as those of libraries cannot always."""
    if isinstance(error, UserError):
        return UserError(str(error))
    return RuntimeError(f"the first process has failed ({type(error).__name__}: {error})")
