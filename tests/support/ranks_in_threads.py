"""Two ranks as threads of this process, for code that needs a sum over ranks but no process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def on_two_ranks(rank_function: Callable[[int, Callable[[Tensor], Tensor]], Tensor]) -> list[Tensor]:
    """Return rank_function(rank, reduce) of both ranks, run in parallel. `reduce` waits for the other rank."""
    barrier, slots = threading.Barrier(2, timeout=20), [torch.empty(0)] * 2

    def reduce(rank: int, tensor: Tensor) -> Tensor:
        slots[rank] = tensor
        barrier.wait()
        total = slots[0] + slots[1]
        barrier.wait()  # neither rank writes again before both have read
        return total

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: rank_function(rank, lambda tensor: reduce(rank, tensor)), range(2)))
