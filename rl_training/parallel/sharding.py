"""Which entries of the parameters a process keeps, and where autograd delivers their gradients.

Everything of parameter size that probes keep is sharded: of each vector (a gradient, an entropy gradient, a step, a
moment) a process holds its own entries of every parameter, flat. Steps are elementwise and products are sums over
entries, so both are calculated where the entries are, and only scalars are summed over processes. Weights that are
loaded for a moment (`load_local_weights`) are exchanged one parameter at a time.

    Shard       one process, or DDP: weights, gradients and states are whole on every process, and each of the N
                processes keeps 1/N of each parameter's vectors
    FullyShard  FSDP2: a process keeps the rows of each parameter that FSDP2 gives it

DeepSpeed's are in hosts/trl/sharding.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_training.parallel.vectors import Layout


def chunk_of(length: int, parts: int, number: int) -> tuple[int, int]:
    """Return the start and stop of part `number` of a vector that torch.chunk cuts; the last parts may be empty.

    >>> [chunk_of(5, 4, number) for number in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    width = -(-length // parts)
    return min(length, number * width), min(length, (number + 1) * width)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch.": "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def clipping_threshold(max_grad_norm: float | None) -> float:
    """Return the norm at which gradients are clipped; inf for None and for numbers that are not positive."""
    return float(max_grad_norm) if max_grad_norm is not None and max_grad_norm > 0 else math.inf


class Shard:
    """This process's entries of the parameters, once training has begun: here 1/N of each whole parameter."""

    gathers_weights = False  # forward passes gather weights, so all processes must run equally many
    layer_rounding = (
        ""  # the reason why forward passes compute with fewer bits than the weights have, "" if they do not
    )
    readable_optimizers: Collection[str] | None = None  # classes whose states can be read here, by full name; None: all

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, replicated: bool = False
    ) -> None:
        """Take the model as training has it.

        Args:
            model: unwrapped.
            optimizer: torch's own, whose `step` is called.
            max_grad_norm: the threshold at which gradients are clipped; None or not positive: they are not.
            replicated: keep every entry on this rank instead of a shard.
        """
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = clipping_threshold(max_grad_norm)
        self.trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        is_sharded = dist.is_initialized() and not replicated
        self.num_ranks = dist.get_world_size() if is_sharded else 1
        self.rank = dist.get_rank() if is_sharded else 0
        # By name, always the same objects: the tensors that autograd delivers whole gradients to, and the tensors that
        # the optimizer updates, which hold at least this process's entries of a parameter.
        self.leaves: Mapping[str, Tensor] = self.trained
        self.optimized: Mapping[str, Tensor] = self.trained

    @property
    def supports_retain_graph(self) -> bool:
        """Whether one forward pass allows several backwards: compiled layers free what they saved in the first."""
        return all(module._compiled_call_impl is None for module in self.model.modules())

    # --- which entries ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def layout(self) -> Layout:
        """The buckets of vectors of this process's entries."""
        return Layout(self.weights(), {name: self.width(name) for name in self.trained})

    def numel(self, name: str) -> int:
        """Return the number of entries of a whole parameter."""
        return self.trained[name].numel()

    def cut(self, name: str, rank: int) -> tuple[int, int]:
        """Return the start and stop of a process's entries in the flat parameter."""
        return chunk_of(self.numel(name), self.num_ranks, rank)

    @functools.cached_property
    def cuts(self) -> dict[str, list[tuple[int, int]]]:
        """The start and stop of every process's entries, by parameter."""
        return {name: [self.cut(name, rank) for rank in range(self.num_ranks)] for name in self.trained}

    def width(self, name: str) -> int:
        """Return the largest number of a parameter's entries that any process keeps."""
        return max(stop - start for start, stop in self.cuts[name])

    def local(self, name: str, value: Tensor) -> Tensor:
        """Return this process's entries, (n,), of a tensor that the model holds: a parameter or its gradient."""
        start, stop = self.cuts[name][self.rank]
        return value.detach().reshape(-1)[start:stop]

    def local_of_optimizer(self, name: str, value: Tensor) -> Tensor:
        """Return this process's entries, (n,), of a tensor of the optimizer: one of `optimized`, or a moment."""
        return self.local(name, value)

    # --- what the loop holds ------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, dict[str, Any]]:
        """Return each parameter's optimizer group, by name. Parameters that are not in the optimizer are left out."""
        groups = {param: group for group in self.optimizer.param_groups for param in group["params"]}
        return {name: groups[param] for name, param in self.trained.items() if param in groups}

    def weights(self) -> dict[str, Tensor]:
        """Return this process's entries of the weights that the optimizer updates, by name, (n,) each."""
        return {name: self.local_of_optimizer(name, value) for name, value in self.optimized.items()}

    def gradients(self) -> dict[str, Tensor | None]:
        """Return this process's entries of the gradient, by name, (n,) each; None for a parameter that got none.

        The gradient is the mean over processes, before clipping.
        """
        return {
            name: None if param.grad is None else self.local(name, param.grad) for name, param in self.trained.items()
        }

    # --- other weights for a moment -----------------------------------------------------------------------------------

    def copy_local_weights(self) -> dict[str, Tensor]:
        """Copy this process's entries of the weights that forward passes compute with, by name."""
        return {name: self.local(name, param).clone() for name, param in self.trained.items()}

    def load_local_weights(self, entries: Mapping[str, Tensor]) -> None:
        """Write what `copy_local_weights` returned, or the like, into the weights. A collective per parameter."""
        for name, param in self.trained.items():
            local = whole = entries[name]
            if self.num_ranks > 1:  # an all-gather of parts of unlike sizes
                whole = local.new_empty(self.numel(name))
                sizes = [stop - start for start, stop in self.cuts[name]]
                dist.all_to_all_single(whole, local.repeat(self.num_ranks), sizes, [len(local)] * self.num_ranks)
            param.data.copy_(whole.view_as(param))

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def reduces_each_backward(self) -> bool:
        """Whether each backward adds the mean over processes to `gradients()`, in at least fp32."""
        return False

    def backward(self, outputs: Sequence[Tensor], weights: Sequence[Tensor], keep_graph: bool) -> dict[str, Tensor]:
        """Run a backward that leaf hooks see. What training has accumulated in `.grad` stays as it is.

        Args:
            outputs: tensors with graph.
            weights: the gradient of each output.
            keep_graph: allow another backward through the same outputs.

        Returns:
            The leaves' gradients on this process by name, as hooks have left them; none where the backward of a
            subclass does not return them.
        """
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(outputs, leaves, weights, retain_graph=keep_graph, allow_unused=True)
        return {name: gradient for name, gradient in zip(self.leaves, gradients, strict=True) if gradient is not None}
