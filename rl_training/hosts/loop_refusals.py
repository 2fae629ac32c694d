"""Refuses what a plain loop may not do while it is measured, in one line with the fix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_training.engine.batch import Rollout, in_one_width
from rl_training.engine.open_step import OpenStep
from rl_training.engine.policy import Policy

FARTHEST = 0.1  # nats per token: largest mean difference between the loop's log-probabilities and the scorer's


def refuse_what_cannot_be_measured(model: nn.Module, module: nn.Module) -> None:
    """Raises ValueError where a second backward would be corrupted, or weights are sharded.

    module  the model less DDP
    """
    if getattr(model, "static_graph", False):
        raise ValueError("a second backward silently corrupts DDP's static_graph: switch it off")
    if any(isinstance(param, DTensor) for param in module.parameters()):
        raise ValueError("measured_loop reads whole parameters, and these are sharded: use DDP, or attach to a trainer")
    checkpointing = [getattr(part, "_gradient_checkpointing_func", None) for part in module.modules()]
    if any(getattr(function, "keywords", {}).get("use_reentrant") for function in checkpointing):
        raise ValueError(
            "reentrant checkpointing gives a second backward no gradients: enable it with use_reentrant=False"
        )


def refuse_other_shapes(rollout: Rollout, logps: Tensor, entropies: Tensor | None, size: int) -> None:
    """Raises ValueError for a microbatch of another size, scores of another shape, and logps without graph."""
    if rollout.num_sequences != size:
        raise ValueError(
            f"a microbatch has {rollout.num_sequences} sequences, but measured_loop(microbatch_size={size})"
        )
    shape = tuple(rollout.completion_ids.shape)
    for name, values in {"logps": logps, "entropies": entropies}.items():
        if values is not None and values.shape != shape:
            raise ValueError(
                f"{name} have shape {tuple(values.shape)}, and completion_ids {shape}: give one value per token"
            )
    if not logps.requires_grad:
        raise ValueError("logps have no graph: pass those that the loss is computed from, not detached")


def refuse_other_scores(rollout: Rollout, logps: Tensor, policy: Policy) -> None:
    """Raises ValueError where a loop's own log-probabilities are not the scorer's: a shift by a token costs nats."""
    there = rollout.completion_mask.bool()
    if not there.any():
        return
    exact = policy.score_rollout(rollout).logps
    rows = torch.arange(len(logps), device=logps.device)
    with_dropout = policy.scorer.score(rollout, rows, graph=False).logps
    rounded = in_one_width([with_dropout], at_least=logps.shape[1])
    off, noise = (float((other - exact)[there].abs().mean()) for other in (logps.detach(), rounded))
    if not off <= FARTHEST + 2 * noise:
        raise ValueError(
            f"logps are {off:.2g} nats per token off the model's at temperature={policy.scorer.temperature:g}: check "
            "the shift by one token, the temperature and the attention mask"
        )


def refuse_missing_backward(step: OpenStep) -> None:
    """Raises ValueError where the latest microbatch had no backward: gradients are told apart by when they arrive."""
    if step.loss_weights and "logps" not in step.loss_weights[-1]:
        raise ValueError(
            f"the backward of microbatch {len(step.loss_weights)} did not reach its logps: compute the loss from the "
            "same tensor that you pass, and call backward before the next microbatch"
        )
