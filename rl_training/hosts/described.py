"""How a training is set up, for its records: what runs that have no config.yaml can be compared by."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

from rl_training.engine.loop_spec import LoopSpec

# Of a parameter group: what a step is made of, whichever optimizer has it.
OF_OPTIMIZER = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")


def settings_of_loop(loop: LoopSpec) -> dict[str, Any]:
    """Return the settings of a training loop that affect it, as far as the engine knows them, by name."""
    shape, scorer = loop.shape, loop.policy.scorer
    return {
        "responses_per_prompt": shape.responses_per_prompt,
        "batch": {
            "sequences_per_step": shape.num_ranks * sum(shape.sizes),
            "microbatch_size": shape.microbatch_size,
            "processes": shape.num_ranks,
        },
        "temperature": scorer.temperature,
        "max_grad_norm": loop.shard.max_grad_norm,
        "model": settings_of_model(loop.policy.model),
        "optimizer": settings_of_optimizer(loop.shard.optimizer),
    }


def settings_of_model(model: nn.Module) -> dict[str, Any]:
    """Return which model is trained, and how much of it."""
    config = getattr(model, "config", None)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return {"name": getattr(config, "name_or_path", "") or type(model).__name__, "trained_parameters": trained}


def settings_of_optimizer(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's kind, and the settings of its first parameter group when training begins."""
    first = optimizer.param_groups[0]
    return {"kind": type(optimizer).__name__} | {name: first[name] for name in OF_OPTIMIZER if name in first}
