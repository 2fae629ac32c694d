"""The optimizer of a running trainer, before its step: the gradients that it gets, its hyperparameters and states."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from trl import GRPOTrainer

from rl_training.live import zero
from rl_training.mathematics.adamw import AdamWState, clipping_threshold
from rl_training.mathematics.sgd import SGDState
from rl_training.step.types import OptimizerView


def deepspeed_engine(trainer: GRPOTrainer) -> Any | None:
    """Returns DeepSpeed's engine, which exists once training has begun and steps within `training_step`; else None."""
    return trainer.model_wrapped if trainer.is_deepspeed_enabled else None


def mean_gradients(trainer: GRPOTrainer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients of the step by name: mean over microbatches and ranks, not clipped.

    Raises ValueError when a trainable parameter has none. ZeRO knows of no such parameter: it has zeros for it.
    """
    engine = deepspeed_engine(trainer)
    if engine is not None:
        of_param = zero.mean_gradients(engine.optimizer, parameters.values())
        return {name: of_param[param] for name, param in parameters.items()}
    missing = [name for name, p in parameters.items() if p.grad is None]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters get no gradient from the loss, {missing[0]!r} among them: "
            "freeze what is not trained (requires_grad_(False))"
        )
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def view_optimizer(trainer: GRPOTrainer, parameters: Mapping[str, nn.Parameter]) -> OptimizerView:
    """Returns the optimizer before its step: its states by parameter name, or the reason why there is no formula.

    Under ZeRO this is a collective: the states are gathered.
    """
    engine = deepspeed_engine(trainer)
    if engine is not None:  # it holds torch's optimizer, and clips
        optimizer, max_grad_norm = engine.optimizer.optimizer, zero.max_grad_norm(engine.optimizer)
    else:
        optimizer, max_grad_norm = trainer.optimizer, clipping_threshold(trainer.args.max_grad_norm)
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
    readers = ADAM_READERS if engine is not None else ADAM_READERS | SGD_READERS
    reason = _why_no_formula(optimizer, tuple(readers))
    if reason:
        return OptimizerView(None, max_grad_norm, reason)
    if engine is not None:
        group_of, state_of = zero.optimizer_states(engine.optimizer, parameters.values())
    else:
        group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
        state_of = optimizer.state
    reason = _why_not_these(parameters, group_of, keeps_fp32_copies=engine is not None)
    if reason:
        return OptimizerView(None, max_grad_norm, reason)
    read = readers[type(optimizer)]
    states = {name: read(param, state_of.get(param, {}), group_of[param]) for name, param in parameters.items()}
    return OptimizerView(states, max_grad_norm)


def _why_no_formula(optimizer: torch.optim.Optimizer, known: Sequence[type]) -> str:
    """Returns why the step of this optimizer has no formula here, "" if it has one."""
    if type(optimizer) not in known:
        names = ", ".join(kind.__name__ for kind in known)
        return f"the step of {type(optimizer).__name__} has no formula here, only those of {names}"
    if any(group.get("amsgrad") or group["maximize"] for group in optimizer.param_groups):
        return "amsgrad and maximize have no formula here"
    return ""


def _why_not_these(
    parameters: Mapping[str, nn.Parameter], group_of: Container[nn.Parameter], *, keeps_fp32_copies: bool
) -> str:
    """Returns why the formula does not say how these parameters move, "" if it does."""
    rounded = [name for name, param in parameters.items() if not keeps_fp32_copies and param.dtype.itemsize < 4]
    if rounded:
        dtype = str(parameters[rounded[0]].dtype).removeprefix("torch.")
        return f"{rounded[0]} is kept in {dtype}, whose rounding decides what a step is: train weights in float32"
    outside = [name for name, param in parameters.items() if param not in group_of]
    if outside:
        return f"parameter {outside[0]} is trainable but not in the optimizer"
    return ""


def _read_adam_state(param: nn.Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> AdamWState:
    """Returns Adam's view of one parameter; its state is zero before the first step, when torch has none yet."""
    return AdamWState(
        exp_avg=state["exp_avg"] if state else torch.zeros_like(param),
        exp_avg_sq=state["exp_avg_sq"] if state else torch.zeros_like(param),
        step=int(state["step"]) if state else 0,
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
    )


def _read_sgd_state(param: nn.Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> SGDState:
    return SGDState(
        momentum_buffer=state.get("momentum_buffer"),
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
    )


Reader = Callable[[nn.Parameter, Mapping[str, Any], Mapping[str, Any]], AdamWState | SGDState]
ADAM_READERS: dict[type, Reader] = {torch.optim.AdamW: _read_adam_state, torch.optim.Adam: _read_adam_state}
SGD_READERS: dict[type, Reader] = {torch.optim.SGD: _read_sgd_state}  # not under ZeRO
