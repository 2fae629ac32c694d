"""DeepSpeed's ZeRO: the partitioned optimizer state and gradient, as full tensors by parameter.

Here are stages 1 and 2; stage 3 is read in zero3.py. Written against deepspeed 0.19; with zero3.py the only file that
names its internals. It is read from the objects that the trainer
already holds, so nothing of DeepSpeed is imported here.

ZeRO lays the parameters of an optimizer group side by side in one flat vector and cuts it into a slice per rank. A rank
keeps fp32 weights, exp_avg, exp_avg_sq and the gradient's mean over ranks for its own slice only. One all-gather a
group and quantity puts the slices together again: three parameter-size vectors on every rank, for as long as a measured
step lasts. safe_get_full_optimizer_state is of no use: with two groups it finds no exp_avg in the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_training.live import zero3
from rl_training.mathematics.adamw import clipping_threshold

READABLE_STAGES = (1, 2, 3)
KINDS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


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


def refuse_other_optimizers(engine: Any) -> None:
    """Raises ValueError when the engine, once built, did not come out with the optimizer that is read here."""
    kind = type(engine.optimizer).__name__
    if kind not in KINDS:
        raise ValueError(
            f"probes do not read DeepSpeed's {kind}, which bf16 weights with fp32 accumulation get on stage 1: use "
            "ZeRO-2 (launch/zero2.yaml), or train without probes (probe=none)"
        )


def max_grad_norm(zero: Any) -> float:
    """Returns the threshold at which ZeRO clips, inf when it does not: the engine clips, not the trainer."""
    return clipping_threshold(zero.clip_grad)


def whole_weights(engine: Any | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which every process has all weights whole; under stage 3 a collective, else nothing."""
    return zero3.gathered(engine) if engine is not None and _is_stage_3(engine.optimizer) else contextlib.nullcontext()


def refuse_what_does_not_fit(engine: Any, parameters: Iterable[nn.Parameter], vectors: int) -> None:
    """Raises ValueError where `vectors` of all trained parameters and the whole weights do not fit on a process."""
    if _is_stage_3(engine.optimizer):
        zero3.refuse_what_does_not_fit(engine.module, parameters, vectors)


def _is_stage_3(zero: Any) -> bool:
    return type(zero).__name__ == KINDS[1]


def mean_gradients(zero: Any, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Returns every parameter's gradient, averaged over ranks and not clipped; to be asked for before engine.step."""
    if _is_stage_3(zero):
        return zero3.mean_gradients(zero, parameters)
    gradients: dict[nn.Parameter, Tensor] = {}
    for group, partition in enumerate(zero.single_partition_of_fp32_groups):
        pieces = [piece.reshape(-1) for piece in zero.averaged_gradients[group]]
        gradients |= _gather(zero, group, torch.cat(pieces).to(partition.dtype))
    return gradients


def optimizer_states(
    zero: Any, parameters: Iterable[nn.Parameter]
) -> tuple[dict[nn.Parameter, dict[str, Any]], dict[nn.Parameter, dict[str, Any]]]:
    """Returns the hyperparameters of every parameter's group, and its state; none of that before the first step."""
    if _is_stage_3(zero):
        return zero3.optimizer_states(zero, parameters)
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
