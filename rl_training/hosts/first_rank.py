"""What one process decides for all: the folder to write to, or that there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
    """
    ranks, said = all_ranks(), list[Any]([None, ""])
    if ranks.number == 0:
        try:
            said[0] = work()
        except UserError as error:
            said[1] = str(error)
    if ranks.count > 1:
        dist.broadcast_object_list(said, src=0, device=device)
    result, refusal = said
    if refusal:
        raise UserError(refusal)
    return result
