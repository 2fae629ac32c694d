"""Calls of a module with its `forward` replaced for the moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rl_training.parallel.fsdp import reshard


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's `forward` inside the context, also if it is patched already."""
    patched = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if patched is not None:
            module.forward = patched


def run_inside_forward(model: nn.Module, calculate: Callable[[], Any]) -> Any:
    """Return `calculate()`, called inside the model's forward pass, whose hooks gather sharded weights. Collective."""
    results: list[Any] = []

    def forward() -> Any:
        results.append(calculate())
        return results[0]

    with replaced_forward(model, forward):
        outputs = model()
    if torch.is_grad_enabled():
        return outputs  # FSDP2 gathers again for the backward of these tensors
    reshard(model)
    return results[0]  # `outputs` may be rounded by FSDP2
