"""How a trainer's launch shards weights, gradients and optimizer states: known once training has begun."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from trl import GRPOTrainer

from rl_training.engine.fsdp2 import FullyShard
from rl_training.engine.sharding import Sharding
from rl_training.hosts.trl.zero import Zero, Zero3


def sharding_of(trainer: GRPOTrainer) -> Sharding:
    """Returns how this training shards its parameters and states. Call it once training has begun."""
    if trainer.is_deepspeed_enabled:
        stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
        return (Zero3 if stage == 3 else Zero)(trainer.model_wrapped)
    return (FullyShard if trainer.is_fsdp_enabled else Sharding)(*_of(trainer))


def replicated(trainer: GRPOTrainer) -> Sharding:
    """Returns the layout of a trainer that takes no step, with the optimizer that it has made."""
    return Sharding(*_of(trainer))


def _of(trainer: GRPOTrainer) -> tuple[Any, ...]:
    optimizer = trainer.optimizer
    own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return trainer.model, own, trainer.args.max_grad_norm
