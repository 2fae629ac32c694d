"""The step of stochastic gradient descent as in PyTorch, split into the same parts as AdamW's.

    d = g + λ θ          b ← μ b + (1−τ) d, or d itself at the first step          δθ = −lr · b
    Nesterov:            δθ = −lr · (d + μ b)

By cause: `momentum` comes from the old b, `gradient` from this g, `decay` from λ.

Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning"; torch.optim.SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.optim.formula import OptimizerState, StepFormula, UpdateParts, maximize_reason
from rl_training.parallel.fusion import Product


@dataclass(frozen=True)
class SGDState(OptimizerState):
    """SGD's state of one parameter BEFORE a step: its momentum and the hyperparameters of its group."""

    momentum_buffer: Tensor | None  # None before the first step, and always without momentum
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    is_updated: bool = True

    def delta(self, param: Tensor, grad: Tensor) -> UpdateParts:
        """Return the change δθ that torch.optim.SGD would make, by cause. Nothing is modified.

        >>> state = SGDState(None, lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)
        >>> state.delta(torch.zeros(2), torch.tensor([1.0, -2.0])).total
        tensor([-0.1000,  0.2000])
        """
        factor = self._factor
        buffer = self.momentum_buffer
        momentum = self._buffer_factor * buffer if buffer is not None else 0.0 * param
        return UpdateParts(momentum=momentum, gradient=factor * grad, decay=(factor * self.weight_decay) * param)

    def products(self, param: Tensor, grad: Tensor, x: Tensor) -> tuple[Product, ...]:
        factor = self._factor
        buffer = self.momentum_buffer
        momentum = Product(self._buffer_factor, x, buffer) if buffer is not None else Product(0.0, x, param)
        return momentum, Product(factor, x, grad), Product(factor * self.weight_decay, x, param)

    @property
    def is_smooth(self) -> bool:
        """True: the step is linear in the gradient."""
        return True

    def derivative(self, param: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, self._factor * torch.ones_like(grad), None

    def gradient_factor(self, param: Tensor, grad: Tensor) -> Tensor:
        return param.new_tensor(self._factor)

    @property
    def _factor(self) -> float:
        """The factor of this step's d in δθ."""
        inflow = 1.0 if self.momentum_buffer is None else 1.0 - self.dampening  # the share of d that enters b
        if self.momentum == 0.0:
            return -self.lr
        return -self.lr * (1.0 + self.momentum * inflow if self.nesterov else inflow)

    @property
    def _buffer_factor(self) -> float:
        """The factor of the old b in δθ."""
        return -self.lr * (self.momentum**2 if self.nesterov else self.momentum)

    @property
    def is_fresh(self) -> bool:
        return self.momentum != 0.0 and self.momentum_buffer is None

    @property
    def steady_state_factor(self) -> float:
        """1 / (1 − μ); with Nesterov 1 / (1 − μ²); at the first step with dampening (1 − τ) / (1 − μ).

        A lasting change ε of d adds (1−τ)/(1−μ) ε to b in the end. To this step it adds (1−τ) ε, at the first step ε.
        With Nesterov, where torch requires τ = 0, the step d + μ b changes by ε / (1−μ) in the end, and now by (1+μ) ε.
        """
        if self.momentum == 0.0:
            return 1.0
        if self.nesterov:
            return 1.0 / (1.0 - self.momentum**2)
        return (1.0 - self.dampening if self.is_fresh else 1.0) / (1.0 - self.momentum)


def _read(weights: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> SGDState:
    return SGDState(
        momentum_buffer=state.get("momentum_buffer"),
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
    )


SGD = StepFormula("torch.optim.sgd.SGD", _read, maximize_reason)
