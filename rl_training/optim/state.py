"""The optimizer of a training loop, before its step: the gradients that it gets, its hyperparameters and states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.optim.adamw import AdamWState
from rl_training.optim.sgd import SGDState
from rl_training.parallel.sharding import Shard, dtype_name


@dataclass(frozen=True)
class OptimizerView:
    """The optimizer before the step: hyperparameters and states, by parameter name.

    `states` is None where there is no formula for the step: `limit` says why.
    """

    states: Mapping[str, AdamWState | SGDState] | None
    max_grad_norm: float  # gradient clipping threshold; inf when there is none
    limit: str = ""
    rounded: str = ""  # which weights are kept in less than fp32, and what is left of a step depends on rounding

    @property
    def first_of_adam(self) -> bool:
        """Whether Adam's moments of some parameter that moves are still zero."""
        states = (self.states or {}).values()
        return any(isinstance(state, AdamWState) and state.moves and state.step == 0 for state in states)


def gradients_and_states(shard: Shard, view: OptimizerView) -> tuple[dict[str, Tensor], OptimizerView]:
    """Return this process's entries of the step's gradient, in at least fp32, not clipped; and what steps on them.

    A parameter that the loss does not reach gets zeros, and torch's optimizers do not update it. (ZeRO's do: to them
    zeros are a gradient.) Raises ValueError when none has a gradient.
    """
    local = shard.gradients()
    unreached = {name for name, gradient in local.items() if gradient is None}
    if len(unreached) == len(local):
        raise UserError(
            "no trainable parameter has a gradient after the backward pass: an optimizer that steps during it, layer "
            "by layer, cannot be measured; use AdamW (optim=adamw_torch), or no probes (no attach; probe=none)"
        )
    weights = shard.weights() if unreached else {}
    dtype = shard.layout.dtype
    gradients = {name: (torch.zeros_like(weights[name]) if g is None else g).to(dtype) for name, g in local.items()}
    if unreached and view.states is not None:
        states = {name: state.not_updated() if name in unreached else state for name, state in view.states.items()}
        view = dataclasses.replace(view, states=states)
    return gradients, view


def view_optimizer(shard: Shard) -> OptimizerView:
    """Return the optimizer before its step: this process's states by parameter name, or why there is no formula."""
    optimizer = shard.optimizer
    max_grad_norm = shard.max_grad_norm
    limit = _formula_limit(optimizer, shard.readable_optimizers)
    if limit:
        return OptimizerView(None, max_grad_norm, limit)
    groups = shard.groups()
    weights = shard.weights()
    outside = [name for name in shard.trained if name not in groups]
    if outside:
        return OptimizerView(None, max_grad_norm, f"parameter {outside[0]} is trainable but not in the optimizer")
    known = _with_steps_as_numbers({name: optimizer.state.get(tensor, {}) for name, tensor in shard.optimized.items()})
    states = {
        name: {key: shard.local_of_optimizer(name, v) if isinstance(v, Tensor) else v for key, v in state.items()}
        for name, state in known.items()
    }
    short = {name: dtype_name(weight.dtype) for name, weight in weights.items() if weight.dtype.itemsize < 4}
    read = _read_sgd_state if isinstance(optimizer, torch.optim.SGD) else _read_adam_state
    return OptimizerView(
        {name: read(weight, states[name], groups[name]) for name, weight in weights.items()}, max_grad_norm,
        rounded=next((f"{name} is kept in {dtype}" for name, dtype in short.items()), ""),
    )  # fmt: skip


def _with_steps_as_numbers(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the states with all step numbers read from the device at once: fused optimizers keep them there."""
    steps = {name: state["step"] for name, state in states.items() if isinstance(state.get("step"), Tensor)}
    if not steps:
        return dict(states)
    numbers = torch.stack([step.reshape(()) for step in steps.values()]).tolist()
    return {**states, **{name: {**states[name], "step": n} for name, n in zip(steps, numbers, strict=True)}}


def _formula_limit(optimizer: torch.optim.Optimizer, supported: Sequence[type]) -> str:
    """Return why the step of this optimizer has no formula here, "" if it has one."""
    if type(optimizer) not in supported:
        *rest, last = (kind.__name__ for kind in supported)
        names = f"{', '.join(rest)} and {last}"
        kind = type(optimizer).__name__
        library = type(optimizer).__module__.partition(".")[0]
        # The name alone may be that of one that has: bitsandbytes has an AdamW with states of 8 bits.
        subject = kind if library == "torch" else f"{library}'{'s' * (library[-1] != 's')} {kind}"
        return f"the step of {subject} has no formula here, only torch's {names} have: probe=measured says what it did"
    if any(group.get("amsgrad") or group["maximize"] for group in optimizer.param_groups):
        return "amsgrad and maximize have no formula here"
    return ""


def _read_adam_state(weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> AdamWState:
    """Return Adam's view of one parameter; its state is zero before the first step, when torch has none yet."""
    return AdamWState(
        exp_avg=state["exp_avg"] if state else torch.zeros_like(weight),
        exp_avg_sq=state["exp_avg_sq"] if state else torch.zeros_like(weight),
        step=int(state["step"]) if state else 0,
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
    )


def _read_sgd_state(weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> SGDState:
    return SGDState(
        momentum_buffer=state.get("momentum_buffer"),
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
    )
