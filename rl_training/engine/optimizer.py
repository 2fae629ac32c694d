"""The optimizer of a training loop, before its step: the gradients that it gets, its hyperparameters and states."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.engine.sharding import Sharding
from rl_training.engine.step import OptimizerView
from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.sgd import SGDState


def mean_gradients(
    sharding: Sharding, parameters: Mapping[str, nn.Parameter], view: OptimizerView
) -> tuple[dict[str, Tensor], OptimizerView]:
    """Returns the gradients of the step by name, mean over microbatches and ranks, not clipped; and what steps on them.

    A parameter that the loss does not reach gets zeros, and torch's optimizers do not update it. (ZeRO's do: to them
    zeros are a gradient.) Raises ValueError when none has a gradient.
    """
    by_parameter = sharding.mean_gradients(parameters.values())
    gradients = {name: by_parameter[param] for name, param in parameters.items()}
    unreached = {name for name, gradient in gradients.items() if gradient is None}
    if len(unreached) == len(parameters):
        raise ValueError(
            "no trainable parameter has a gradient after the backward pass: an optimizer that steps during it, layer "
            "by layer, cannot be measured; use AdamW (optim=adamw_torch), or train without probes (probe=none)"
        )
    whole = {name: torch.zeros_like(parameters[name]) if g is None else g for name, g in gradients.items()}
    if unreached and view.states is not None:
        states = {name: state.not_updated() if name in unreached else state for name, state in view.states.items()}
        view = dataclasses.replace(view, states=states)
    return whole, view


def view_optimizer(sharding: Sharding, parameters: Mapping[str, nn.Parameter]) -> OptimizerView:
    """Returns the optimizer before its step: its states by parameter name, or the reason why there is no formula.

    A collective where states are gathered.
    """
    optimizer, max_grad_norm = sharding.optimizer, sharding.max_grad_norm
    reason = _why_no_formula(optimizer, sharding.readable_optimizers)
    if not reason:
        group_of, state_of = sharding.optimizer_states(parameters.values())
        reason = _why_not_these(parameters, group_of, keeps_fp32_copies=sharding.keeps_fp32_copies)
    if reason:
        return OptimizerView(None, max_grad_norm, reason)
    raw = _with_steps_as_numbers({name: state_of.get(param, {}) for name, param in parameters.items()})
    read = _read_sgd_state if isinstance(optimizer, torch.optim.SGD) else _read_adam_state
    states = {name: read(param, raw[name], group_of[param]) for name, param in parameters.items()}
    return OptimizerView(states, max_grad_norm)


def _with_steps_as_numbers(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the states with all step numbers read from the device at once: fused optimizers keep them there."""
    steps = {name: state["step"] for name, state in states.items() if isinstance(state.get("step"), Tensor)}
    if not steps:
        return dict(states)
    numbers = torch.stack([step.reshape(()) for step in steps.values()]).tolist()
    return {**states, **{name: {**states[name], "step": n} for name, n in zip(steps, numbers, strict=True)}}


def _why_no_formula(optimizer: torch.optim.Optimizer, supported: Sequence[type]) -> str:
    """Returns why the step of this optimizer has no formula here, "" if it has one."""
    if type(optimizer) not in supported:
        names = ", ".join(kind.__name__ for kind in supported)
        return f"the step of {type(optimizer).__name__} has no formula here; supported are {names}"
    if any(group.get("amsgrad") or group["maximize"] for group in optimizer.param_groups):
        return "amsgrad and maximize have no formula here"
    return ""


def _why_not_these(
    parameters: Mapping[str, nn.Parameter], group_of: Container[Tensor], *, keeps_fp32_copies: bool
) -> str:
    """Returns why the formula does not say how these parameters move, "" if it does."""
    rounded = [name for name, param in parameters.items() if not keeps_fp32_copies and param.dtype.itemsize < 4]
    if rounded:
        dtype = str(parameters[rounded[0]].dtype).removeprefix("torch.")
        return f"{rounded[0]} is kept in {dtype}, whose rounding changes the step: train weights in float32"
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
