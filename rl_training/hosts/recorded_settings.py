"""The settings of a training, for its records: they allow runs without a config.yaml to be compared."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

from rl_training.engine.loop_spec import LoopSpec
from rl_training.records.made_by import LOOP, MADE_BY

# Settings of a parameter group that affect a step, in any optimizer that has them.
OPTIMIZER_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")


def settings_of_loop(loop: LoopSpec, kl_share: float | None = None) -> dict[str, Any]:
    """Return the settings that affect a training loop and that the engine knows, by name.

    Args:
        loop: The loop.
        kl_share: The share of entropy to which each step's KL is set. None if learning rates are the loop's own.
    """
    scorer = loop.policy.scorer
    return {
        MADE_BY: LOOP,
        "responses_per_prompt": loop.responses_per_prompt,
        "batch": {
            "sequences_per_step": loop.ranks.count * sum(loop.sizes),
            "microbatch_size": loop.microbatch_size,
            "processes": loop.ranks.count,
        },
        "temperature": scorer.temperature,
        "max_grad_norm": loop.shard.max_grad_norm,
        "target_kl_share": kl_share,
        "model": settings_of_model(loop.policy.model),
        "optimizer": settings_of_optimizer(loop.shard.optimizer),
    }


def settings_of_model(model: nn.Module) -> dict[str, Any]:
    """Return the model's name and its number of trained parameters."""
    config = getattr(model, "config", None)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return {"name": getattr(config, "name_or_path", "") or type(model).__name__, "trained_parameters": trained}


def settings_of_optimizer(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's class, and the current settings of its first parameter group."""
    first = optimizer.param_groups[0]
    return {"kind": type(optimizer).__name__} | {name: first[name] for name in OPTIMIZER_SETTINGS if name in first}
