"""How the launch of a trainer shards weights, gradients and optimizer states, which is known once training has begun.

The only file that uses DeepSpeed's internals, written against 0.19. It reads objects that the trainer already holds:
weights and gradients here, moments in optim/state.py, each through `local_of_optimizer`.

Stages 1 and 2 concatenate the parameters of an optimizer group into one flat vector, and cut it into one slice per
rank, even in the middle of a parameter. A rank keeps fp32 weights, exp_avg, exp_avg_sq and the gradient's mean over
ranks for its slice only. Stage 3 cuts each flat parameter, including the model's, into equal parts, and concatenates
the parts of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from trl import GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.trl.members import ZERO, ZERO3, ZERO_MEMBERS
from rl_training.hosts.trl.settings.spelling import WITHOUT_PROBES
from rl_training.optim.adamw import ADAM, ADAMW
from rl_training.parallel.fsdp import FullyShard
from rl_training.parallel.sharding import Shard, chunk_of

DEEPSPEED = "deepspeed>=0.19.8,<0.20"  # the same as in setup.cfg


def shard_of(trainer: GRPOTrainer) -> Shard:
    """Return how this training shards its parameters and optimizer states. Call it once training has begun."""
    if trainer.is_deepspeed_enabled:
        return (Zero3 if has_sharded_weights(trainer) else Zero)(trainer.model_wrapped)
    optimizer = trainer.optimizer
    optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    kind = FullyShard if trainer.is_fsdp_enabled else Shard
    return kind(trainer.model, optimizer, lambda: trainer.args.max_grad_norm)  # a callback may change the threshold


def has_sharded_weights(trainer: GRPOTrainer) -> bool:
    """Return whether a rank holds only a part of each parameter, as under FSDP2 and ZeRO-3."""
    zero3 = trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
    return trainer.is_fsdp_enabled or zero3


class Position(NamedTuple):
    """Where a parameter's entries lie in this rank's flat vectors."""

    group: int  # of the optimizer
    flat: int  # index of the flat vector
    start: int  # in that vector; negative if the parameter begins on an earlier rank


class Zero(Shard):
    """ZeRO stages 1 and 2, where DeepSpeed's engine clips and steps. Weights are not sharded.

    A rank keeps flat vectors, in which its entries of each parameter are contiguous.

    Args:
        engine: DeepSpeed's engine.

    Raises:
        UserError: For an engine whose optimizer is of another kind, or lacks a member that is read here.
    """

    keeps_gradients = False
    KIND = ZERO  # class of the engine's optimizer that is read here
    FLAT_WEIGHTS = "single_partition_of_fp32_groups"  # this rank's flat weights; moments have the same layout
    readable_optimizers = (ADAMW.optimizer, ADAM.optimizer)  # others have not been tried

    def __init__(self, engine: Any) -> None:
        kind = type(engine.optimizer).__name__
        if kind != self.KIND:
            raise UserError(
                f"probes do not read DeepSpeed's {kind}, which bf16 weights with fp32 accumulation get on stage 1: use "
                f"ZeRO-2 (launch/zero2.yaml), or {WITHOUT_PROBES}"
            )
        missing = [name for name in ZERO_MEMBERS[kind] if not hasattr(engine.optimizer, name)]
        if missing:
            version = metadata.version("deepspeed")
            raise UserError(
                f"{kind}.{missing[0]} is gone in deepspeed {version}: pip install '{DEEPSPEED}', or {WITHOUT_PROBES}"
            )
        self._zero = engine.optimizer
        super().__init__(engine.module, self._zero.optimizer, lambda: self._zero.clip_grad)
        self._flats: list[Tensor] = getattr(self._zero, self.FLAT_WEIGHTS)
        self._positions = self._find_positions()
        self.optimized = {name: self._flats[position.flat] for name, position in self._positions.items()}

    def _find_positions(self) -> dict[str, Position]:
        """Return the position of each parameter, by name."""
        zero = self._zero
        positions: dict[nn.Parameter, Position] = {}
        for group, params in enumerate(zero.round_robin_bit16_groups):
            first = self.rank * self._flats[group].numel()
            starts = zip(params, zero.round_robin_bit16_offsets[group], strict=True)
            positions |= {param: Position(group, group, start - first) for param, start in starts}
        return {name: positions[param] for name, param in self.trained.items()}

    def entry_range(self, name: str, rank: int) -> tuple[int, int]:
        position = self._positions[name]
        width = self._flats[position.flat].numel()
        entries = self.numel(name)
        start = position.start + (self.rank - rank) * width
        return min(entries, max(0, -start)), min(entries, max(0, width - start))

    def groups(self) -> dict[str, dict[str, Any]]:
        return {name: self.optimizer.param_groups[position.group] for name, position in self._positions.items()}

    def local_of_optimizer(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's entries of a parameter in a flat vector with the layout of the flat weights.

        `view_optimizer` in optim/state.py uses it to read Adam's exp_avg and exp_avg_sq.
        """
        begin, end = self.entry_range(name, self.rank)
        return value.detach().reshape(-1)[max(0, self._positions[name].start) :][: end - begin]

    def gradients(self) -> dict[str, Tensor | None]:
        """Return this rank's entries of the gradients, zeros where there is none. Call it before engine.step."""
        averaged = self._zero.averaged_gradients
        flats = [torch.cat([piece.flatten() for piece in averaged[number]]) for number in range(len(self._flats))]
        return {name: self.local_of_optimizer(name, flats[position.flat]) for name, position in self._positions.items()}


class Zero3(Zero):
    """ZeRO stage 3, which cuts each parameter separately."""

    KIND = ZERO3
    FLAT_WEIGHTS = "fp32_partitioned_groups_flat"
    gathers_weights = True
    supports_retain_graph = False  # weights are released in the backward

    def _find_positions(self) -> dict[str, Position]:
        zero = self._zero
        positions = {}
        for name, param in self.trained.items():
            flat, start, _ = zero.grad_position[zero.get_param_id(param)]
            positions[name] = Position(zero.sub_group_to_group_id[flat], flat, start)
        return positions

    def numel(self, name: str) -> int:
        return int(self.trained[name].ds_numel)  # type: ignore[attr-defined]  # even while it is sharded and empty

    def entry_range(self, name: str, rank: int) -> tuple[int, int]:
        return chunk_of(self.numel(name), self.num_ranks, rank)

    def local(self, name: str, value: Tensor) -> Tensor:
        start, stop = self.entry_range(name, self.rank)
        part: Tensor = value.ds_tensor  # type: ignore[attr-defined]
        return part.detach().reshape(-1)[: stop - start]  # without the padding that makes all parts equally long

    def load_local_weights(self, entries: Mapping[str, Tensor]) -> None:
        self._zero.empty_partition_cache()  # else weights that are already gathered (prefetched) would be used instead
        for name, param in self.trained.items():
            self.local(name, param).copy_(entries[name])
        small = self._zero.persistent_parameters  # these stay gathered, so gather them again, as engine.step does
        if small:
            small[0].all_gather(small)
