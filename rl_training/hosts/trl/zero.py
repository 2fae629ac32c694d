"""DeepSpeed's ZeRO: the partitioned optimizer state and gradient, as full tensors by parameter.

Here are stages 1 and 2; stage 3 is read in zero3.py. Written against deepspeed 0.19; with zero3.py the only file that
names its internals. It is read from the objects that the trainer already holds, so nothing of DeepSpeed is imported
here.

ZeRO lays the parameters of an optimizer group side by side in one flat vector and cuts it into a slice per rank. A rank
keeps fp32 weights, exp_avg, exp_avg_sq and the gradient's mean over ranks for its own slice only. One all-gather a
group and quantity puts the slices together again: three parameter-size vectors on every rank, for as long as a measured
step lasts. safe_get_full_optimizer_state is of no use: with two groups it finds no exp_avg in the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_training.engine.sharding import ByParameter, trainable
from rl_training.mathematics.adamw import clipping_threshold

READABLE_STAGES = (1, 2, 3)


def refuse_what_cannot_be_read(config: Mapping[str, Any]) -> None:
    """Raises ValueError, saying what to do, for a DeepSpeed configuration under which probes cannot measure."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in READABLE_STAGES:
        raise ValueError(
            f"probes read the gradients and states of ZeRO stages 1, 2 and 3, and this is stage {stage}: use "
            "launch/zero2.yaml, or DDP (launch/ddp.yaml), or train without probes (probe=none)"
        )
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device", "none") != "none":
            raise ValueError(
                f"probes do not read what ZeRO has offloaded: leave out {name}, or train without probes (probe=none)"
            )


class Zero:
    """ZeRO stages 1 and 2, whose engine steps, and clips. The weights are whole. Raises ValueError for others."""

    KIND = "DeepSpeedZeroOptimizer"  # that is read here
    keeps_fp32_copies = True
    readable_optimizers = (torch.optim.AdamW, torch.optim.Adam)

    def __init__(self, engine: Any) -> None:
        kind = type(engine.optimizer).__name__
        if kind != self.KIND:
            raise ValueError(
                f"probes do not read DeepSpeed's {kind}, which bf16 weights with fp32 accumulation get on stage 1: use "
                "ZeRO-2 (launch/zero2.yaml), or train without probes (probe=none)"
            )
        self._engine, self._zero = engine, engine.optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._zero.optimizer

    @property
    def max_grad_norm(self) -> float:
        return clipping_threshold(self._zero.clip_grad)

    def trained(self) -> dict[str, nn.Parameter]:
        return trainable(self._engine.module)

    def whole_weights(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mean_gradients(self, parameters: Iterable[nn.Parameter]) -> Mapping[nn.Parameter, Tensor | None]:
        """Returns whole gradients, to be asked for before engine.step; zeros of a parameter that got none."""
        gradients: dict[nn.Parameter, Tensor | None] = {}
        for group, partition in enumerate(self._zero.single_partition_of_fp32_groups):
            pieces = [piece.reshape(-1) for piece in self._zero.averaged_gradients[group]]
            gradients |= self._gather(group, torch.cat(pieces).to(partition.dtype))
        return gradients

    def optimizer_states(self, parameters: Iterable[nn.Parameter]) -> tuple[ByParameter, ByParameter]:
        group_of: ByParameter = {}
        states: ByParameter = {}
        for group, partition in enumerate(self._zero.single_partition_of_fp32_groups):
            hyperparameters, in_group = self._zero.optimizer.param_groups[group], self._zero.bit16_groups[group]
            group_of |= dict.fromkeys(in_group, hyperparameters)
            for key, value in self._zero.optimizer.state.get(partition, {}).items():
                sliced = isinstance(value, Tensor) and value.shape == partition.shape  # not the number of steps
                full = self._gather(group, value) if sliced else dict.fromkeys(in_group, value)
                for param in full:
                    states.setdefault(param, {})[key] = full[param]
        return group_of, states

    def refuse_what_does_not_fit(self, vectors: int) -> None:
        """Nothing but what is trained is gathered, which is whole on every process as it is."""

    def _gather(self, group: int, partition: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns a group's parameter-shaped views of the flat vector that the ranks' slices make up. A collective."""
        process_group = self._zero.real_dp_process_group[group]
        slices = partition.new_empty(dist.get_world_size(process_group), partition.numel())
        dist.all_gather(list(slices), partition, group=process_group)
        places = zip(
            self._zero.round_robin_bit16_groups[group], self._zero.round_robin_bit16_offsets[group], strict=True
        )
        return {param: slices.view(-1)[start : start + param.numel()].view(param.shape) for param, start in places}
