"""How a launch lays weights, gradients and optimizer states out over processes. For FSDP2 see fsdp2.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.mathematics.adamw import clipping_threshold

ByParameter = dict[Tensor, dict[str, Any]]


class Sharding:
    """A layout, as it is once training has begun: here everything whole on every process, a single one or under DDP.

    Where a layout gathers, the call is a collective: all ranks make it.

    model          unwrapped            optimizer  torch's own, which steps
    max_grad_norm  the threshold at which the gradient is clipped; None, 0 and below: it is not
    """

    keeps_fp32_copies = False  # what is updated is fp32, whatever the forward pass computes with
    readable_optimizers: tuple[type[torch.optim.Optimizer], ...] = (  # whose states can be read here
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.SGD,
    )

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.max_grad_norm = clipping_threshold(max_grad_norm)

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns the trainable parameters by name: the leaves of the forward pass, whole while it runs."""
        return trainable(self.model)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which every process has gathered all weights and can run forward passes alone."""
        return contextlib.nullcontext()

    def mean_gradients(self, parameters: Iterable[nn.Parameter]) -> Mapping[nn.Parameter, Tensor | None]:
        """Returns whole gradients, the mean over ranks, before clipping; None of a parameter that got none."""
        return {param: param.grad for param in parameters}

    def optimizer_states(self, parameters: Iterable[nn.Parameter]) -> tuple[ByParameter, ByParameter]:
        """Returns the hyperparameters of every parameter's group, and its whole state; none before the first step."""
        group_of = {param: group for group in self.optimizer.param_groups for param in group["params"]}
        return group_of, dict(self.optimizer.state)

    def refuse_what_does_not_fit(self, vectors: int) -> None:
        """Raises ValueError where what a measured step gathers, and so many vectors of it, does not fit."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters of a model, by name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def refuse_what_does_not_fit(
    launch: str, model: nn.Module, vectors: int, size: Callable[[nn.Parameter], int] = nn.Parameter.numel
) -> None:
    """Raises ValueError, with the memory it would take, where the whole weights and so many fp32 vectors do not fit.

    They are compared with the memory of a process: its GPU's, or its share of the machine's.
    """
    weights = sum(size(p) * p.element_size() for p in model.parameters())
    trained = 4 * vectors * sum(map(size, trainable(model).values()))
    available = _bytes_of_a_process()
    if weights + trained > available:
        raise ValueError(
            f"under {launch} a measured step gathers all weights ({weights / 1e9:.1f} GB) and {vectors} fp32 vectors "
            f"of what is trained ({trained / 1e9:.1f} GB) on every process, which has {available / 1e9:.1f} GB: "
            "train an adapter (adapter=lora), have fewer folds (probes.simple.num_folds), or train without probes "
            "(probe=none)"
        )


def _bytes_of_a_process() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
