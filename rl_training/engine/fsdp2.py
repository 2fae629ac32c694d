"""Reads torch's FSDP2 (fully_shard), which shards weights, gradients and optimizer states, by gathering them.

Written against torch 2.13; the only file that uses FSDP2's internals. A parameter is a DTensor
wherever no forward or backward needs it. During these FSDP substitutes a gathered one, always the same object, which is
the leaf of training's graph: its hooks see this rank's gradient alone, before it is averaged and sharded.

While probes measure a step, and only then, every process has all parameters gathered, in the precision that the
optimizer keeps (in mixed precision FSDP's are rounded), and FSDP's own hooks, which would reshard them after each
forward pass, are off. Gradients and states come as DTensor.full_tensor, one all-gather for each parameter and quantity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_training.engine.sharding import ByParameter, Sharding, refuse_what_does_not_fit, trainable

FSDP2 = "torch.distributed.fsdp._fully_shard"  # the package whose functions are its hooks
GATHERING_METHOD = "generate"  # transformers hides the class's behind one that lets FSDP gather


class FullyShard(Sharding):
    """FSDP2: the loop's own optimizer and clipping, on DTensors."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        super().__init__(model, optimizer, max_grad_norm)
        self._shard_of: dict[nn.Parameter, nn.Parameter] = {}

    def trained(self) -> dict[str, nn.Parameter]:
        with self.whole_weights():
            return trainable(self.model)

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        model = self.model
        _reshard(model)
        shards = dict(model.named_parameters())
        for module in _sharded_modules(model):
            module.unshard()
        self._shard_of = {leaf: shards[name] for name, leaf in model.named_parameters()}
        rounded = {leaf: leaf.data for leaf, shard in self._shard_of.items() if leaf.dtype != shard.dtype}
        try:
            for leaf in rounded:
                leaf.data = _whole(self._shard_of[leaf].detach())
            with _no_hooks(model):
                yield
        finally:
            for leaf, data in rounded.items():
                leaf.data = data
            _reshard(model)

    def mean_gradients(self, parameters: Iterable[nn.Parameter]) -> Mapping[nn.Parameter, Tensor | None]:
        return {param: _whole(self._shard_of[param].grad) for param in parameters}

    def optimizer_states(self, parameters: Iterable[nn.Parameter]) -> tuple[ByParameter, ByParameter]:
        group_of_shard, state_of = super().optimizer_states(parameters)
        group_of: ByParameter = {}
        states: ByParameter = {}
        for param in parameters:
            shard = self._shard_of[param]
            if shard in group_of_shard:
                group_of[param] = group_of_shard[shard]
            if state_of.get(shard):
                states[param] = {key: _whole(value) for key, value in state_of[shard].items()}
        return group_of, states

    def refuse_what_does_not_fit(self, vectors: int) -> None:
        refuse_what_does_not_fit("FSDP2", self.model, vectors)


def _whole(value: Any) -> Any:
    """Returns what a DTensor is a slice of; everything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshard(model: nn.Module) -> None:
    for module in _sharded_modules(model):
        module.reshard()


@contextlib.contextmanager
def _no_hooks(model: nn.Module) -> Iterator[None]:
    """A context without FSDP's forward hooks on the model; other hooks stay, in their order."""
    tables = [table for m in model.modules() for table in (m._forward_pre_hooks, m._forward_hooks)]
    before = [dict(table) for table in tables]
    gathering = vars(model).pop(GATHERING_METHOD, None)
    for table in tables:
        for key, hook in list(table.items()):
            if (getattr(hook, "__module__", None) or "").startswith(FSDP2):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)
        if gathering is not None:
            setattr(model, GATHERING_METHOD, gathering)
