"""FSDP2 (fully_shard). No other file reads torch's private names of FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from rl_training.errors import UserError
from rl_training.parallel.sharding import ClippingNorm, Shard, chunk_of, dtype_name


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 keeps gathered after a forward pass without a backward.

    An optimizer step would not update the gathered copies. Modules that FSDP2 does not shard are left alone.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class FullyShard(Shard):
    """The shard under FSDP2 (fully_shard): DTensors, cut along their first dimension.

    During a forward or backward, FSDP2 replaces each DTensor by a gathered parameter, always the same object, which is
    the leaf of the graph. The constructor finds these leaves. Collective.

    Args:
        model: The unwrapped model.
        optimizer: The torch optimizer whose `step` is called.
        max_grad_norm: The threshold at which gradients are clipped, or a function that returns the current one. None or
            not positive: no clipping.

    Raises:
        UserError: A parameter is not cut along its first dimension over all ranks.
    """

    gathers_weights = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: ClippingNorm) -> None:
        super().__init__(model, optimizer, max_grad_norm)
        for name, param in self.trained.items():
            placement = param.placements if isinstance(param, DTensor) else "a plain tensor"
            if placement != (ShardPlacement(0),):
                raise UserError(
                    f"probes need FSDP2 to cut every parameter along its first dimension over all processes, but "
                    f"{name} is {placement}: shard without hybrid or tensor parallelism, or train without probes"
                )
        self.leaves = self._find_leaves()
        rounded = [name for name, leaf in self.leaves.items() if leaf.itemsize < self.trained[name].itemsize]
        if rounded:
            dtype = dtype_name(self.leaves[rounded[0]].dtype)
            self.layer_rounding = f"FSDP2 gathers {rounded[0]} in {dtype}, so the model's numbers are rounded"

    def entry_range(self, name: str, rank: int) -> tuple[int, int]:
        rows = self.trained[name].shape[0]
        entries = self.trained[name].numel()
        start, stop = chunk_of(rows, self.num_ranks, rank)
        return start * (entries // rows), stop * (entries // rows)

    def local(self, name: str, value: Tensor) -> Tensor:
        with torch.no_grad():  # skips DTensor's dispatch, which takes longer than most kernels
            local: Tensor = value.to_local()  # type: ignore[attr-defined]
        return local.reshape(-1)

    def load_local_weights(self, entries: Mapping[str, Tensor]) -> None:
        reshard(self.model)  # otherwise forward passes would use the gathered ones
        for name, param in self.trained.items():
            self.local(name, param).copy_(entries[name])

    @contextlib.contextmanager
    def gathered_once(self) -> Iterator[None]:
        groups = self._groups()
        if not groups:
            raise UserError("keep_gathered does not know how FSDP2 of this torch groups parameters: leave it out")
        settings = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
        try:
            for group in groups:
                group.post_forward_mesh_info = None
                group.reshard_after_backward = False
            yield
        finally:
            for group, (mesh_info, reshards) in zip(groups, settings, strict=True):
                group.post_forward_mesh_info = mesh_info
                group.reshard_after_backward = reshards
            reshard(self.model)

    def _states(self) -> list[Any]:
        return [module._get_fsdp_state() for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _groups(self) -> list[Any]:
        """Return the groups of parameters that are gathered together. Older torch names them otherwise: none."""
        return [group for state in self._states() for group in getattr(state, "_fsdp_param_groups", ())]

    @property
    def reduces_each_backward(self) -> bool:
        states = self._states()
        groups = self._groups()
        # Unreduced gradients of earlier microbatches would be reduced together with the next microbatch's.
        unreduced = [param.unsharded_accumulated_grad for group in groups for param in group.fsdp_params]
        unreduced += [leaf.grad for leaf in self.leaves.values()]
        is_full_precision = all(param.dtype.itemsize >= 4 for param in self.trained.values())
        is_reducing = bool(groups) and all(group.reduce_grads for group in groups)
        is_waiting = all(state._state_ctx.is_last_backward for state in states)  # each backward waits for its reduction
        return is_full_precision and is_reducing and is_waiting and all(gradient is None for gradient in unreduced)

    def _find_leaves(self) -> dict[str, Tensor]:
        """Return the gathered parameters by name, gathering one module at a time. Collective."""
        leaf_of: dict[Tensor, Tensor] = {}
        for module in self.model.modules():  # root first: it sets up the others, which stay sharded meanwhile
            if isinstance(module, FSDPModule):
                shards = list(module.parameters())
                module.unshard()
                leaf_of |= zip(shards, module.parameters(), strict=True)
                module.reshard()
        return {name: leaf_of[param] for name, param in self.trained.items()}

    def backward(self, outputs: Sequence[Tensor], weights: Sequence[Tensor], keep_graph: bool) -> dict[str, Tensor]:
        # The DTensors are not in the graph, so FSDP2's own backward must run. It writes to .grad, which is restored.
        before = {param: param.grad for param in self.trained.values()}
        try:
            for param in before:
                param.grad = None
            torch.autograd.backward(outputs, weights, retain_graph=keep_graph)
        finally:
            for param, gradient in before.items():
                param.grad = gradient
        return {}
