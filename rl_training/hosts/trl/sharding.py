"""How a trainer's launch shards weights, gradients and optimizer states: known once training has begun.

The only file that uses DeepSpeed's internals, written against 0.19. It reads objects that the trainer already holds.

Stages 1 and 2 lay the parameters of an optimizer group side by side in one flat vector and cut it into a slice per
rank, anywhere. A rank keeps fp32 weights, exp_avg, exp_avg_sq and the gradient's mean over ranks for its slice only.
Stage 3 cuts each flat parameter into equal parts, weights too; its own getters return a rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from trl import GRPOTrainer

from rl_training.engine.shards import FullyShard, Shard, States, chunk_of


def shard_of(trainer: GRPOTrainer) -> Shard:
    """Returns how this training shards its parameters and states. Call it once training has begun."""
    if trainer.is_deepspeed_enabled:
        return (Zero3 if has_sharded_weights(trainer) else Zero)(trainer.model_wrapped)
    return (FullyShard if trainer.is_fsdp_enabled else Shard)(*_parts(trainer))


def replicated(trainer: GRPOTrainer) -> Shard:
    """Returns all of it, on every process, of a trainer that takes no step, with the optimizer that it has made."""
    model, optimizer, max_grad_norm = _parts(trainer)
    return Shard(model, optimizer, max_grad_norm, alone=True)


def has_sharded_weights(trainer: GRPOTrainer) -> bool:
    """Returns whether a process holds a part of each parameter: under FSDP2 and ZeRO-3."""
    zero3 = trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
    return trainer.is_fsdp_enabled or zero3


def _parts(trainer: GRPOTrainer) -> tuple[Any, ...]:
    optimizer = trainer.optimizer
    own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return trainer.model, own, trainer.args.max_grad_norm


class Zero(Shard):
    """ZeRO stages 1 and 2, whose engine clips and steps. Weights are not sharded. ValueError for other stages."""

    KIND = "DeepSpeedZeroOptimizer"  # that is read here
    readable_optimizers = (torch.optim.AdamW, torch.optim.Adam)

    def __init__(self, engine: Any) -> None:
        kind = type(engine.optimizer).__name__
        if kind != self.KIND:
            raise ValueError(
                f"probes do not read DeepSpeed's {kind}, which bf16 weights with fp32 accumulation get on stage 1: use "
                "ZeRO-2 (launch/zero2.yaml), or train without probes (probe=none)"
            )
        self._zero = engine.optimizer
        super().__init__(engine.module, self._zero.optimizer, self._zero.clip_grad)
        self._find_places()

    def _find_places(self) -> None:
        """Finds the group of each parameter, where in the group's flat vector it starts, and the width of a slice."""
        zero, names = self._zero, {param: name for name, param in self.trained.items()}
        self._place: dict[str, tuple[int, int]] = {}
        for group, params in enumerate(zero.round_robin_bit16_groups):
            starts = zero.round_robin_bit16_offsets[group]
            self._place |= {names[param]: (group, start) for param, start in zip(params, starts, strict=True)}
        self._widths = [part.numel() for part in zero.single_partition_of_fp32_groups]

    def cut(self, name: str, rank: int) -> tuple[int, int]:
        group, start = self._place[name]
        width, entries = self._widths[group], self.numel(name)
        begin, end = (min(entries, max(0, border * width - start)) for border in (rank, rank + 1))
        return begin, end

    def _of_slices(self, slices: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """Returns the entries of each parameter in this rank's slices, given by group."""
        found = [slices(group).detach().reshape(-1) for group in range(len(self._widths))]
        entries = {}
        for name, (group, start) in self._place.items():
            begin, end = self.cut(name, self.rank)
            first = start + begin - self.rank * self._widths[group]
            entries[name] = found[group][first : first + end - begin] if end > begin else found[group][:0]
        return {name: entries[name] for name in self.trained}

    def weights(self) -> dict[str, Tensor]:
        return self._of_slices(lambda group: self._zero.single_partition_of_fp32_groups[group])

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns this rank's entries; call it before engine.step. Zeros for a parameter that got none."""
        partitions, gradients = self._zero.single_partition_of_fp32_groups, self._zero.averaged_gradients
        return dict(
            self._of_slices(
                lambda group: torch.cat([piece.reshape(-1) for piece in gradients[group]]).to(partitions[group].dtype)
            )
        )

    def states(self) -> tuple[States, States]:
        zero, partitions = self._zero, self._zero.single_partition_of_fp32_groups
        groups = {name: zero.optimizer.param_groups[group] for name, (group, _) in self._place.items()}
        states: States = {name: {} for name in self.trained}
        flat = [zero.optimizer.state.get(partition, {}) for partition in partitions]
        for key in {key for state in flat for key in state}:
            if key == "step":
                found: dict[str, Any] = {name: flat[group][key] for name, (group, _) in self._place.items()}
            else:
                found = self._of_slices(lambda group, key=key: flat[group][key])  # type: ignore[misc]
            for name, value in found.items():
                states[name][key] = value
        return groups, states


class Zero3(Zero):
    """ZeRO stage 3."""

    KIND = "DeepSpeedZeroOptimizer_Stage3"
    gathers_weights = True

    @property
    def graph_lasts(self) -> bool:
        return False  # weights are released in the backward

    def _find_places(self) -> None:
        """Nothing to find: each parameter is cut by itself."""

    def numel(self, name: str) -> int:
        return int(self.trained[name].ds_numel)  # type: ignore[attr-defined]  # even while it is sharded and empty

    def cut(self, name: str, rank: int) -> tuple[int, int]:
        return chunk_of(self.numel(name), self.num_ranks, rank)

    def _part(self, name: str, value: Tensor) -> Tensor:
        start, stop = self.cut(name, self.rank)
        return value.detach().reshape(-1)[: stop - start]  # behind it: what the equal parts are filled up with

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_local_fp32_param

        return {name: self._part(name, safe_get_local_fp32_param(param)) for name, param in self.trained.items()}

    def gradients(self) -> dict[str, Tensor | None]:
        from deepspeed.utils import safe_get_local_grad

        found = {name: safe_get_local_grad(param) for name, param in self.trained.items()}
        return {name: None if value is None else self._part(name, value) for name, value in found.items()}

    def states(self) -> tuple[States, States]:
        from deepspeed.utils import safe_get_local_optimizer_state

        zero = self._zero
        groups: States = {}
        states: States = {}
        for name, param in self.trained.items():
            sub_group, _, _ = zero.grad_position[zero.get_param_id(param)]
            groups[name] = zero.optimizer.param_groups[zero.sub_group_to_group_id[sub_group]]
            state = zero.optimizer.state.get(zero.fp32_partitioned_groups_flat[sub_group], {})
            states[name] = {
                key: value if key == "step" else self._part(name, safe_get_local_optimizer_state(param, key))
                for key, value in state.items()
            }
        return groups, states

    def held(self) -> dict[str, Tensor]:
        return {name: self._part(name, param.ds_tensor).clone() for name, param in self.trained.items()}  # type: ignore[attr-defined]

    def put(self, entries: Mapping[str, Tensor]) -> None:
        self._zero.empty_partition_cache()  # what is gathered, perhaps ahead of a backward, would be used instead
        for name, param in self.trained.items():
            self._part(name, param.ds_tensor).copy_(entries[name])  # type: ignore[attr-defined]
        small = self._zero.persistent_parameters  # they stay gathered: the engine's own step gathers them anew, too
        if small:
            small[0].all_gather(small)
