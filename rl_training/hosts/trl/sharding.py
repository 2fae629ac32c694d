"""How a trainer's launch shards weights, gradients and optimizer states: known once training has begun.

The only file that uses DeepSpeed's internals, written against 0.19. It reads objects that the trainer already holds.

Stages 1 and 2 lay the parameters of an optimizer group side by side in one flat vector and cut it into a slice per
rank. A rank keeps fp32 weights, exp_avg, exp_avg_sq and the gradient's mean over ranks for its own slice only; an
all-gather per group and quantity joins the slices. (safe_get_full_optimizer_state finds no exp_avg in a second group.)

Stage 3 shards the weights too: a parameter is empty unless a forward or backward needs it. During a measured step, and
only then, every process holds all of them gathered, as TRL does to generate, and the engine's hooks, which would shard
them again, are removed. Gradients and states come from the optimizer's own getters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.models.utils import add_hooks, remove_hooks

from rl_training.engine.fsdp2 import FullyShard
from rl_training.engine.sharding import ByParameter, Sharding, refuse_what_does_not_fit


def sharding_of(trainer: GRPOTrainer) -> Sharding:
    """Returns how this training shards its parameters and states. Call it once training has begun."""
    if trainer.is_deepspeed_enabled:
        return (Zero3 if has_sharded_weights(trainer) else Zero)(trainer.model_wrapped)
    return (FullyShard if trainer.is_fsdp_enabled else Sharding)(*_of(trainer))


def replicated(trainer: GRPOTrainer) -> Sharding:
    """Returns the layout of a trainer that takes no step, with the optimizer that it has made."""
    return Sharding(*_of(trainer))


def has_sharded_weights(trainer: GRPOTrainer) -> bool:
    """Returns whether a process holds a part of each parameter: under FSDP2 and ZeRO-3."""
    of_deepspeed = trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
    return trainer.is_fsdp_enabled or of_deepspeed


def _of(trainer: GRPOTrainer) -> tuple[Any, ...]:
    optimizer = trainer.optimizer
    own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return trainer.model, own, trainer.args.max_grad_norm


class Zero(Sharding):
    """ZeRO stages 1 and 2, whose engine clips and steps. Weights are not sharded. ValueError for other stages."""

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
        super().__init__(engine.module, self._zero.optimizer, self._zero.clip_grad)

    def mean_gradients(self, parameters: Iterable[nn.Parameter]) -> Mapping[nn.Parameter, Tensor | None]:
        """Returns gathered gradients; call it before engine.step. Zeros for a parameter that got none."""
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
                sliced = _is_slice(value, partition)
                full = self._gather(group, value) if sliced else dict.fromkeys(in_group, value)
                for param in full:
                    states.setdefault(param, {})[key] = full[param]
        return group_of, states

    def _gather(self, group: int, partition: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns a group's parameter-shaped views of the flat vector that the ranks' slices make up. A collective."""
        process_group = self._zero.real_dp_process_group[group]
        slices = partition.new_empty(dist.get_world_size(process_group), partition.numel())
        dist.all_gather(list(slices), partition, group=process_group)
        places = zip(
            self._zero.round_robin_bit16_groups[group], self._zero.round_robin_bit16_offsets[group], strict=True
        )
        return {param: slices.view(-1)[start : start + param.numel()].view(param.shape) for param, start in places}


class Zero3(Zero):
    """ZeRO stage 3."""

    KIND = "DeepSpeedZeroOptimizer_Stage3"

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self._engine.module.parameters())):
            remove_hooks(self._engine)  # which would shard them again
            try:
                yield
            finally:
                add_hooks(self._engine)

    def mean_gradients(self, parameters: Iterable[nn.Parameter]) -> Mapping[nn.Parameter, Tensor | None]:
        return {param: self._zero.get_fp32_grad_for_param(param) for param in parameters}

    def optimizer_states(self, parameters: Iterable[nn.Parameter]) -> tuple[ByParameter, ByParameter]:
        zero = self._zero
        group_of: ByParameter = {}
        states: ByParameter = {}
        for param in parameters:
            group, _, _ = zero.grad_position[zero.get_param_id(param)]
            flat = zero.fp32_partitioned_groups_flat[group]
            group_of[param] = zero.optimizer.param_groups[zero.sub_group_to_group_id[group]]
            for key, value in zero.optimizer.state.get(flat, {}).items():
                full = zero.get_full_hp_param(param, key) if _is_slice(value, flat) else value
                states.setdefault(param, {})[key] = full
        return group_of, states

    def refuse_what_does_not_fit(self, vectors: int) -> None:
        # The number of entries of a parameter, even while it is sharded and empty.
        refuse_what_does_not_fit(
            "ZeRO-3", self._engine.module, vectors, lambda param: int(getattr(param, "ds_numel", param.numel()))
        )


def _is_slice(value: Any, flat: Tensor) -> bool:
    """Returns whether a state is of parameters' entries, and not the number of steps."""
    return isinstance(value, Tensor) and value.shape == flat.shape
