"""Two ranks as threads of this process, for code that needs a sum over ranks but no process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.parallel.ranks import Ranks
from rl_training.policy.precision import ieee_fp32


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


class OutOfStep(AssertionError):
    """One rank is in a collective that the other does not join: with two processes, the first would wait for ever."""


class CountingRanks:
    """Two ranks whose forward passes are collectives, as with sharded weights. They run in turn, never in parallel.

    A rank that enters a collective waits there for the other. If the other enters a different one, or has ended, the
    run raises OutOfStep at once.
    """

    def __init__(self) -> None:
        self.num_passes = [0, 0]  # by rank
        self._condition, self._turn = threading.Condition(), threading.Lock()
        self._thread = threading.local()
        self._waiting: dict[int, tuple[str, Tensor]] = {}  # by rank: the collective that it is in
        self._total, self._num_met, self._error, self._has_ended = torch.empty(0), 0, "", False

    def current(self) -> Ranks:
        """Return the ranks as this thread's rank sees them. Stands in for `all_ranks`."""
        ranks: Ranks = self._thread.ranks
        return ranks

    def watch(self, model: nn.Module) -> nn.Module:
        """Make each forward pass of this rank's model a collective, and return the model."""
        rank = self.current().number

        def enter(*args: Any) -> None:
            self.num_passes[rank] += 1
            self._meet(rank, "a forward pass", torch.zeros(1))

        model.register_forward_pre_hook(enter)
        return model

    def run(self, rank_function: Callable[[Ranks], Any]) -> list[Any]:
        """Return rank_function(ranks) of both ranks. A rank's own error comes first, then OutOfStep."""
        with ieee_fp32(), ThreadPoolExecutor(2) as pool:  # a precision that both ranks set is the process's
            futures = [pool.submit(self._run_rank, rank_function, rank) for rank in range(2)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, OutOfStep)):
            raise error
        return [future.result() for future in futures]

    def _run_rank(self, rank_function: Callable[[Ranks], Any], rank: int) -> Any:
        def reduce(tensor: Tensor) -> Tensor:
            return self._meet(rank, f"a sum of shape {tuple(tensor.shape)}", tensor)

        self._thread.ranks = Ranks(2, reduce, rank)
        with self._turn:
            try:
                return rank_function(self._thread.ranks)
            finally:
                with self._condition:
                    self._has_ended = True
                    self._condition.notify_all()

    def _meet(self, rank: int, what: str, tensor: Tensor) -> Tensor:
        """Wait until both ranks are in this collective, and return the sum of their tensors."""
        with self._condition:
            if self._has_ended:
                raise OutOfStep(f"rank {rank} is in {what}, and the other one has ended")
            number = self._num_met
            self._waiting[rank] = what, tensor
            is_first = len(self._waiting) == 1
            if is_first:
                self._turn.release()
                self._condition.wait_for(lambda: self._num_met > number or self._has_ended, timeout=60)
            else:
                (first, one), (second, other) = self._waiting[0], self._waiting[1]
                self._error = "" if first == second else f"rank 0 is in {first}, rank 1 in {second}"
                self._total = tensor if self._error else one + other
                self._waiting, self._num_met = {}, number + 1
                self._condition.notify_all()
        if is_first:
            self._turn.acquire()
        if self._error or self._num_met == number:
            raise OutOfStep(self._error or f"rank {rank} is in {what}, and the other one has ended")
        return self._total
