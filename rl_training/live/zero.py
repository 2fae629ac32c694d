"""DeepSpeed's ZeRO stages 1 and 2: the partitioned optimizer state and gradient, as full tensors by parameter.

Written against deepspeed 0.19; the only file that names its internals. It is read from the objects that the trainer
already holds, so nothing of DeepSpeed is imported here.

ZeRO lays the parameters of an optimizer group side by side in one flat vector and cuts it into a slice per rank. A rank
keeps fp32 weights, exp_avg, exp_avg_sq and the gradient's mean over ranks for its own slice only. One all-gather a
group and quantity puts the slices together again: three parameter-size vectors on every rank, for as long as a measured
step lasts. safe_get_full_optimizer_state is of no use: with two groups it finds no exp_avg in the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_training.mathematics.adamw import clipping_threshold

READABLE_STAGES = (1, 2)


def refuse_what_cannot_be_read(config: Mapping[str, Any]) -> None:
    """Raises ValueError, saying what to do, for a DeepSpeed configuration under which probes cannot measure."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in READABLE_STAGES:
        raise ValueError(
            f"probes read the gradients and states of ZeRO stages 1 and 2, and this is stage {stage}: use "
            "launch/zero2.yaml, or DDP (launch/ddp.yaml), or train without probes (probe=none)"
        )
    if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        raise ValueError(
            "probes do not read the offloaded optimizer of ZeRO: leave out offload_optimizer, or train without probes "
            "(probe=none)"
        )


def refuse_other_optimizers(engine: Any) -> None:
    """Raises ValueError when the engine, once built, did not come out with the optimizer that is read here."""
    kind = type(engine.optimizer).__name__
    if kind != "DeepSpeedZeroOptimizer":
        raise ValueError(
            f"probes do not read DeepSpeed's {kind}, which bf16 weights with fp32 accumulation get on stage 1: use "
            "ZeRO-2 (launch/zero2.yaml), or train without probes (probe=none)"
        )


def max_grad_norm(zero: Any) -> float:
    """Returns the threshold at which ZeRO clips, inf when it does not: the engine clips, not the trainer."""
    return clipping_threshold(zero.clip_grad)


def mean_gradients(zero: Any) -> dict[nn.Parameter, Tensor]:
    """Returns every parameter's gradient, averaged over ranks and not clipped; to be asked for before engine.step."""
    gradients: dict[nn.Parameter, Tensor] = {}
    for group, partition in enumerate(zero.single_partition_of_fp32_groups):
        pieces = [piece.reshape(-1) for piece in zero.averaged_gradients[group]]
        gradients |= _gather(zero, group, torch.cat(pieces).to(partition.dtype))
    return gradients


def optimizer_states(zero: Any) -> tuple[dict[nn.Parameter, dict[str, Any]], dict[nn.Parameter, dict[str, Any]]]:
    """Returns the hyperparameters of every parameter's group, and its state; none of that before the first step."""
    group_of: dict[nn.Parameter, dict[str, Any]] = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for group, partition in enumerate(zero.single_partition_of_fp32_groups):
        hyperparameters = zero.optimizer.param_groups[group]
        group_of |= dict.fromkeys(zero.bit16_groups[group], hyperparameters)
        for key, value in zero.optimizer.state.get(partition, {}).items():
            sliced = isinstance(value, Tensor) and value.shape == partition.shape  # not the number of steps
            full = _gather(zero, group, value) if sliced else dict.fromkeys(zero.bit16_groups[group], value)
            for param in full:
                states.setdefault(param, {})[key] = full[param]
    return group_of, states


def _gather(zero: Any, group: int, partition: Tensor) -> dict[nn.Parameter, Tensor]:
    """Returns a group's parameter-shaped views of the flat vector that the ranks' slices make up. A collective."""
    process_group = zero.real_dp_process_group[group]
    slices = partition.new_empty(dist.get_world_size(process_group), partition.numel())
    dist.all_gather(list(slices), partition, group=process_group)
    places = zip(zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group], strict=True)
    return {param: slices.view(-1)[start : start + param.numel()].view(param.shape) for param, start in places}
