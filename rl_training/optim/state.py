"""The optimizer of a training loop before its step: gradients, hyperparameters and states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.optim.adamw import AdamWState
from rl_training.optim.sgd import SGDState
from rl_training.parallel.sharding import Shard, dtype_name
from rl_training.statistics.limit import Limit

NO_FORMULA = Limit(
    "no_formula",
    "the step of {optimizer} has no formula here, only torch's {supported} have",
    fix="probe=measured says what it did",
)
NO_AMSGRAD = Limit("no_formula", "amsgrad and maximize have no formula here")
NOT_IN_OPTIMIZER = Limit("not_in_optimizer", "parameter {name} is trainable but not in the optimizer")


@dataclass(frozen=True)
class OptimizerView:
    """The optimizer before its step."""

    states: Mapping[str, AdamWState | SGDState] | None  # by parameter name; None where the step has no formula
    max_grad_norm: float  # gradient clipping threshold; inf when there is none
    limit: Limit | None = None  # the reason why `states` is None
    rounded: str = ""  # names weights kept in less than fp32, so that rounding decides what is left of a step

    @property
    def first_of_adam(self) -> bool:
        """Whether Adam's moments of some parameter that moves are still zero."""
        states = (self.states or {}).values()
        return any(isinstance(state, AdamWState) and state.moves and state.step == 0 for state in states)

    @property
    def steady_state_factor(self) -> float:
        """What a step does once all of the momentum includes a change of gradients, as a multiple of its effect now.

        (1 − β1^t) / (1 − β1) at the t-th step of Adam, 1 / (1 − μ) of SGD; nan where parameters differ.
        """
        factors = set()
        for state in (self.states or {}).values():
            if isinstance(state, AdamWState):
                beta = state.betas[0]
                factor = (1.0 - beta ** (state.step + 1)) / (1.0 - beta)
            else:
                factor = 1.0 / (1.0 - state.momentum)
            factors |= {factor} if state.moves else set()
        return factors.pop() if len(factors) == 1 else math.nan


def gradients_and_states(shard: Shard, view: OptimizerView) -> tuple[dict[str, Tensor], OptimizerView]:
    """Read the step's gradient, and mark in the optimizer's view the parameters that it will not update.

    A parameter that the loss does not reach gets zeros here, and torch's optimizers do not update it. (ZeRO's do: for
    them zeros are a gradient.)

    Returns:
        This process's entries of the gradient by name, (n,) each, in at least fp32, before clipping; and the view.

    Raises:
        UserError: no parameter has a gradient.
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
        return OptimizerView(None, max_grad_norm, NOT_IN_OPTIMIZER.filled(name=outside[0]))
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
    """Read all step numbers from the device at once, where fused optimizers keep them, and return the states."""
    steps = {name: state["step"] for name, state in states.items() if isinstance(state.get("step"), Tensor)}
    if not steps:
        return dict(states)
    numbers = torch.stack([step.reshape(()) for step in steps.values()]).tolist()
    return {**states, **{name: {**states[name], "step": n} for name, n in zip(steps, numbers, strict=True)}}


def _formula_limit(optimizer: torch.optim.Optimizer, supported: Sequence[type]) -> Limit | None:
    """Return the limit of an optimizer whose step has no formula here, or None."""
    if type(optimizer) not in supported:
        *rest, last = (kind.__name__ for kind in supported)
        names = f"{', '.join(rest)} and {last}"
        kind = type(optimizer).__name__
        library = type(optimizer).__module__.partition(".")[0]
        # The class name alone may be a supported one: bitsandbytes has an AdamW with 8-bit states.
        subject = kind if library == "torch" else f"{library}'{'s' * (library[-1] != 's')} {kind}"
        return NO_FORMULA.filled(optimizer=subject, supported=names)
    if any(group.get("amsgrad") or group["maximize"] for group in optimizer.param_groups):
        return NO_AMSGRAD
    return None


def _read_adam_state(weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> AdamWState:
    """Return Adam's view of one parameter. Before the first step torch has no state, and the moments are zero."""
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
