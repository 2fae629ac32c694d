"""Which entries of the parameters a rank keeps, and where autograd delivers their gradients.

Everything of parameter size that probes keep is sharded: a rank holds only its own entries of each vector (a gradient,
an entropy gradient, an update, a moment), flat by parameter. Updates are elementwise and products are sums over
entries, so both are calculated where the entries are, and only scalars are summed over ranks. Weights that are loaded
temporarily (`load_local_weights`) are exchanged one parameter at a time.

    Shard       one process, or DDP: weights, gradients and states are whole on each of the N ranks, and each rank keeps
                1/N of each parameter's vectors
    FullyShard  FSDP2: a rank keeps the rows of each parameter that FSDP2 assigns to it

DeepSpeed's shards are in hosts/trl/sharding.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_training.parallel.fusion import Fusion
from rl_training.parallel.vectors import LARGE, Layout

ClippingNorm = float | Callable[[], float | None] | None  # the threshold, or a function that returns the current one


def chunk_of(length: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return the start and stop of chunk `index` when torch.chunk cuts a vector; the last chunks may be empty.

    >>> [chunk_of(5, 4, index) for index in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-length // num_chunks)
    return min(length, index * size), min(length, (index + 1) * size)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch.": "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def clipping_threshold(max_grad_norm: float | None) -> float:
    """Return the norm that gradients are clipped to; inf for None and for numbers that are not positive."""
    return float(max_grad_norm) if max_grad_norm is not None and max_grad_norm > 0 else math.inf


class Shard:
    """This rank's entries of the parameters, 1/N of each. Only valid once training has set up model and optimizer.

    Args:
        model: The unwrapped model.
        optimizer: The torch optimizer whose `step` is called.
        max_grad_norm: The threshold at which gradients are clipped, or a function that returns the current one. None or
            not positive: no clipping.
    """

    gathers_weights = False  # whether forward passes gather weights, so that all ranks must run equally many
    keeps_gradients = True  # whether `gradients()` can still be read right before the optimizer's step
    layer_rounding = ""  # why forward passes compute with fewer bits than the weights have; "" if they do not
    readable_optimizers: Collection[str] | None = None  # full names of classes whose states can be read; None: all

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: ClippingNorm) -> None:
        self.model = model
        self.optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self.trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # `leaves`: the tensors that autograd delivers whole gradients to. `optimized`: the tensors that the optimizer
        # updates, which hold at least this rank's entries of a parameter. Both by name, and always the same objects.
        self.leaves: Mapping[str, Tensor] = self.trained
        self.optimized: Mapping[str, Tensor] = self.trained

    @property
    def max_grad_norm(self) -> float:
        """The threshold at which the next step's gradient is clipped; inf if it is not."""
        norm = self._max_grad_norm
        return clipping_threshold(norm() if callable(norm) else norm)

    @property
    def supports_retain_graph(self) -> bool:
        """Whether one forward pass allows several backwards. Compiled layers free their saved tensors in the first."""
        return all(module._compiled_call_impl is None for module in self.model.modules())

    # --- which entries ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def layout(self) -> Layout:
        """How vectors of this rank's entries are divided into buckets."""
        return Layout.of(self.weights(), {name: self.max_entries(name) for name in self.trained})

    def with_fusion(self, fusion: Fusion) -> Self:
        """Return this shard with another way to run functions of its vectors. Everything else is shared."""
        shard = copy.copy(self)
        shard.layout = dataclasses.replace(self.layout, fusion=fusion)
        return shard

    def numel(self, name: str) -> int:
        """Return the number of entries of a whole parameter."""
        return self.trained[name].numel()

    def entry_range(self, name: str, rank: int) -> tuple[int, int]:
        """Return the start and stop of a rank's entries in the flat parameter."""
        return chunk_of(self.numel(name), self.num_ranks, rank)

    @functools.cached_property
    def entry_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """The start and stop of every rank's entries, by parameter."""
        return {name: [self.entry_range(name, rank) for rank in range(self.num_ranks)] for name in self.trained}

    def max_entries(self, name: str) -> int:
        """Return the largest number of a parameter's entries that any rank keeps."""
        return max(stop - start for start, stop in self.entry_ranges[name])

    def local(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's entries, (n,), of a tensor that the model holds: a parameter or its gradient."""
        start, stop = self.entry_ranges[name][self.rank]
        return value.detach().reshape(-1)[start:stop]

    def local_of_optimizer(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's entries, (n,), of a tensor that the optimizer holds: one of `optimized`, or a moment."""
        return self.local(name, value)

    # --- what the loop holds ------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, dict[str, Any]]:
        """Return each parameter's optimizer group, by name, without parameters that are not in the optimizer."""
        groups = {param: group for group in self.optimizer.param_groups for param in group["params"]}
        return {name: groups[param] for name, param in self.trained.items() if param in groups}

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's entries of the weights that the optimizer updates, by name, (n,) each."""
        return {name: self.local_of_optimizer(name, value) for name, value in self.optimized.items()}

    def gradients(self) -> dict[str, Tensor | None]:
        """Return this rank's entries of the gradient, by name, (n,) each; None for a parameter without one.

        The gradient is the mean over ranks, before clipping.
        """
        return {
            name: None if param.grad is None else self.local(name, param.grad) for name, param in self.trained.items()
        }

    # --- temporary weights --------------------------------------------------------------------------------------------

    def copy_local_weights(self) -> dict[str, Tensor]:
        """Return copies of this rank's entries of the weights that forward passes compute with, by name."""
        return {name: self.local(name, param).clone() for name, param in self.trained.items()}

    def load_local_weights(self, entries: Mapping[str, Tensor]) -> None:
        """Write entries, named and shaped as `copy_local_weights` returns them, into the weights.

        One collective per parameter.
        """
        for name, param in self.trained.items():
            local = whole = entries[name]
            if self.num_ranks > 1:  # an all-gather of parts with different sizes
                whole = local.new_empty(self.numel(name))
                sizes = [stop - start for start, stop in self.entry_ranges[name]]
                dist.all_to_all_single(whole, local.repeat(self.num_ranks), sizes, [len(local)] * self.num_ranks)
            param.data.copy_(whole.view_as(param))

    # --- passes of probes ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def prefers_rank_folds(self) -> bool:
        """Whether a fold should be what some ranks have in a whole step, not some microbatches of all ranks.

        That takes fewer passes, but a pass has vectors of all folds at once, so they must not be large. Where weights
        are gathered, the loop's own backward reduces folds of all ranks, and nothing else is sent. Equal on all ranks.
        """
        return not self.gathers_weights and sum(map(self.max_entries, self.trained)) < LARGE

    def gathered_once(self) -> AbstractContextManager[None]:
        """Return a context in which weights that a pass gathers are kept for the passes that follow."""
        return nullcontext()

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def reduces_each_backward(self) -> bool:
        """Whether each backward adds the mean over ranks to `gradients()`, in at least fp32."""
        return False

    def backward(self, outputs: Sequence[Tensor], weights: Sequence[Tensor], keep_graph: bool) -> dict[str, Tensor]:
        """Run a backward that triggers the leaves' hooks, without changing what training has accumulated in `.grad`.

        Args:
            outputs: Tensors with a graph.
            weights: The gradient of each output.
            keep_graph: Allow another backward through the same outputs.

        Returns:
            The leaves' gradients on this rank, by name, as the hooks have left them. Empty for subclasses whose
            backward does not return them.
        """
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(outputs, leaves, weights, retain_graph=keep_graph, allow_unused=True)
        return {name: gradient for name, gradient in zip(self.leaves, gradients, strict=True) if gradient is not None}
