"""The processes of torch.distributed that train together: one where it was not started."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from rl_training.engine.step import Ranks


def rank() -> int:
    """Returns the number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_ranks() -> Ranks:
    """Returns all processes of the default group."""
    return Ranks(dist.get_world_size() if dist.is_initialized() else 1, _sum_over_ranks)


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    """Returns the sum of a small tensor over all processes. A collective."""
    total = tensor.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total
