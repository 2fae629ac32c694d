"""Which entries of the parameters a process keeps, and where autograd delivers their gradients.

Everything of parameter size that probes keep is a shard: of each vector (a gradient, an entropy gradient, a step, a
moment) a process holds the entries of the parameters that are its own, flat. Steps are elementwise, products are sums
over entries, so both are calculated where the entries are, and scalars are summed over processes at the end. Other
weights for a moment (`put`) are exchanged one parameter at a time.

    Shard       weights, gradients and states whole on every process, one or under DDP: each keeps 1/N of each parameter
    FullyShard  FSDP2: a process keeps what FSDP2 gives it, rows of each parameter

DeepSpeed's are in hosts/trl/sharding.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_training.parallel.vectors import Layout


def chunk_of(length: int, parts: int, number: int) -> tuple[int, int]:
    """Return where part `number` of a vector starts and stops, as torch.chunk cuts it; later parts may be empty.

    >>> [chunk_of(5, 4, number) for number in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    width = -(-length // parts)
    return min(length, number * width), min(length, (number + 1) * width)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def clipping_threshold(max_grad_norm: float | None) -> float:
    """Return the norm at which gradients are clipped; inf where they are not: for None, 0 and below."""
    return float(max_grad_norm) if max_grad_norm is not None and max_grad_norm > 0 else math.inf


class Shard:
    """This process's entries, as they lie once training has begun: here 1/N of each parameter, which is whole.

    model          unwrapped            optimizer  torch's own, which steps
    max_grad_norm  the threshold at which the gradient is clipped; None, 0 and below: it is not
    alone          this process keeps all entries, whatever others do
    """

    gathers_weights = False  # forward passes gather them: all processes run equally many
    layer_rounding = ""  # why forward passes compute with less than the weights that are updated, "" if they do not
    readable_optimizers: tuple[type, ...] = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)  # that have formulas

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, replicated: bool = False
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.max_grad_norm = clipping_threshold(max_grad_norm)
        self.trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        together = dist.is_initialized() and not replicated
        self.num_ranks = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        # By name, always the same objects: the tensors that autograd delivers whole gradients to, and those that the
        # optimizer updates, with this process's entries of a parameter or more.
        self.leaves: Mapping[str, Tensor] = self.trained
        self.optimized: Mapping[str, Tensor] = self.trained

    @property
    def supports_retain_graph(self) -> bool:
        """Whether several backwards may go through one forward pass: compiled layers give up what they saved."""
        return all(module._compiled_call_impl is None for module in self.model.modules())

    # --- which entries ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def layout(self) -> Layout:
        """How vectors of this process's entries lie in buckets."""
        return Layout(self.weights(), {name: self.width(name) for name in self.trained})

    def numel(self, name: str) -> int:
        """Return the entries of a whole parameter."""
        return self.trained[name].numel()

    def cut(self, name: str, rank: int) -> tuple[int, int]:
        """Return which entries of the flat parameter are kept by a process: start and stop."""
        return chunk_of(self.numel(name), self.num_ranks, rank)

    @functools.cached_property
    def cuts(self) -> dict[str, list[tuple[int, int]]]:
        """The cuts of each parameter, by process."""
        return {name: [self.cut(name, rank) for rank in range(self.num_ranks)] for name in self.trained}

    def width(self, name: str) -> int:
        """Return the most entries of a parameter that any process keeps."""
        return max(stop - start for start, stop in self.cuts[name])

    def local(self, name: str, value: Tensor) -> Tensor:
        """Return this process's entries of a tensor that the model holds: a parameter or its gradient, (n,)."""
        start, stop = self.cuts[name][self.rank]
        return value.detach().reshape(-1)[start:stop]

    def local_of_optimizer(self, name: str, value: Tensor) -> Tensor:
        """Return this process's entries of a tensor that the optimizer holds: of `optimized`, or of a moment, (n,)."""
        return self.local(name, value)

    # --- what the loop holds ------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, dict[str, Any]]:
        """Return the hyperparameters of each parameter's group; none for one that is not in the optimizer."""
        groups = {param: group for group in self.optimizer.param_groups for param in group["params"]}
        return {name: groups[param] for name, param in self.trained.items() if param in groups}

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the optimizer updates, by name, (n,) each."""
        return {name: self.local_of_optimizer(name, value) for name, value in self.optimized.items()}

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient, the mean over processes, not clipped, (n,); None for a parameter that got none."""
        return {
            name: None if param.grad is None else self.local(name, param.grad) for name, param in self.trained.items()
        }

    # --- other weights for a moment -----------------------------------------------------------------------------------

    def copy_local_weights(self) -> dict[str, Tensor]:
        """Return this process's entries of the weights that forward passes compute with, by name: copies."""
        return {name: self.local(name, param).clone() for name, param in self.trained.items()}

    def load_local_weights(self, entries: Mapping[str, Tensor]) -> None:
        """Write entries, laid out as those of `held`, into these weights, a parameter at a time. A collective."""
        for name, param in self.trained.items():
            own = whole = entries[name]
            if self.num_ranks > 1:  # an all-gather of parts of unlike sizes
                whole = own.new_empty(self.numel(name))
                sizes = [stop - start for start, stop in self.cuts[name]]
                dist.all_to_all_single(whole, own.repeat(self.num_ranks), sizes, [len(own)] * self.num_ranks)
            param.data.copy_(whole.view_as(param))

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def reduces_each_backward(self) -> bool:
        """Whether each backward adds the mean over processes to `gradients()`, in at least fp32."""
        return False

    def backward(self, outputs: Sequence[Tensor], weights: Sequence[Tensor], keep_graph: bool) -> dict[str, Tensor]:
        """Run a backward that hooks see, and returns what it leaves of the gradients, by name.

        What training has accumulated stays as it is.
        """
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(outputs, leaves, weights, retain_graph=keep_graph, allow_unused=True)
        return {name: gradient for name, gradient in zip(self.leaves, found, strict=True) if gradient is not None}
