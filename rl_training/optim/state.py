"""A training loop's optimizer before its step: gradients, hyperparameters and states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.optim.formula import OptimizerState
from rl_training.optim.supported import formula_of
from rl_training.parallel.sharding import Shard, dtype_name
from rl_training.statistics.unavailable import Unavailable

NOT_IN_OPTIMIZER = Unavailable("not_in_optimizer", "parameter {name} is trainable but not in the optimizer")


@dataclass(frozen=True)
class OptimizerView:
    """The optimizer before its step."""

    states: Mapping[str, OptimizerState] | None  # by parameter name; None if the step has no formula
    max_grad_norm: float  # gradient clipping threshold; inf if there is none
    reason: Unavailable | None = None  # why `states` is None
    rounding_reason: str = ""  # names a parameter kept in less than fp32 and its dtype, if rounding changes the step

    @property
    def has_sign_based_step(self) -> bool:
        """Whether some parameter's step size does not depend on its gradient's: Adam's first step, any of Lion's."""
        return any(state.is_sign_based for state in (self.states or {}).values())

    @property
    def max_error(self) -> float:
        """A step that differs from the formula by more than this share of its norm did not follow it."""
        return max((state.max_error for state in (self.states or {}).values()), default=OptimizerState.max_error)

    @property
    def steady_state_factor(self) -> float:
        """The factor of `OptimizerState.steady_state_factor`; nan if parameters differ in it."""
        factors = {state.steady_state_factor for state in (self.states or {}).values() if state.is_updated}
        return factors.pop() if len(factors) == 1 else math.nan


def gradients_and_view(shard: Shard, view: OptimizerView) -> tuple[dict[str, Tensor], OptimizerView]:
    """Read the step's gradient, and mark in the optimizer's view the parameters that it will not update.

    A parameter that the loss does not reach gets a gradient of zeros here, and torch's optimizers do not update it.
    (ZeRO's optimizers do: they treat zeros as a gradient.)

    Returns:
        This rank's entries of the gradient before clipping, by name, (n,) each, in at least fp32. Then the marked view.

    Raises:
        UserError: No parameter has a gradient.
    """
    local = shard.gradients()
    unreached = {name for name, gradient in local.items() if gradient is None}
    if len(unreached) == len(local):
        raise UserError(
            "no trainable parameter has a gradient after the backward pass: an optimizer that steps during the "
            "backward, layer by layer, cannot be measured; use AdamW (optim=adamw_torch), or no probes (no attach; "
            "probe=none)"
        )
    weights = shard.weights() if unreached else {}
    dtype = shard.layout.dtype
    gradients = {name: (torch.zeros_like(weights[name]) if g is None else g).to(dtype) for name, g in local.items()}
    if unreached and view.states is not None:
        states = {name: state.not_updated() if name in unreached else state for name, state in view.states.items()}
        view = dataclasses.replace(view, states=states)
    return gradients, view


def view_optimizer(shard: Shard) -> OptimizerView:
    """Return the optimizer before its step: this rank's states by parameter name, or why there is no formula."""
    optimizer = shard.optimizer
    max_grad_norm = shard.max_grad_norm
    formula = formula_of(optimizer, shard.readable_optimizers)
    if isinstance(formula, Unavailable):
        return OptimizerView(None, max_grad_norm, formula)
    groups = shard.groups()
    weights = shard.weights()
    missing = [name for name in shard.trained if name not in groups]
    if missing:
        return OptimizerView(None, max_grad_norm, NOT_IN_OPTIMIZER.formatted(name=missing[0]))
    raw_states = _with_steps_as_numbers(
        {name: optimizer.state.get(tensor, {}) for name, tensor in shard.optimized.items()}
    )
    states = {
        name: {key: shard.local_of_optimizer(name, v) if isinstance(v, Tensor) else v for key, v in state.items()}
        for name, state in raw_states.items()
    }
    low_precision = {name: dtype_name(weight.dtype) for name, weight in weights.items() if weight.dtype.itemsize < 4}
    return OptimizerView(
        {name: formula.read(weight, states[name], groups[name]) for name, weight in weights.items()}, max_grad_norm,
        rounding_reason=next((f"{name} is kept in {dtype}" for name, dtype in low_precision.items()), ""),
    )  # fmt: skip


def _with_steps_as_numbers(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the states with step numbers as ints. Fused optimizers keep them on the device: all are read at once."""
    steps = {name: state["step"] for name, state in states.items() if isinstance(state.get("step"), Tensor)}
    if not steps:
        return dict(states)
    numbers = torch.stack([step.reshape(()) for step in steps.values()]).tolist()
    return {**states, **{name: {**states[name], "step": n} for name, n in zip(steps, numbers, strict=True)}}
