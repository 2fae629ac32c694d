"""The step of stochastic gradient descent as PyTorch takes it, in the same parts as AdamW's.

    d = g + λ θ          b ← μ b + (1−τ) d, or d itself at the first step          δθ = −lr · b
    Nesterov:            δθ = −lr · (d + μ b)

The parts by cause: `momentum` comes from the old b, `gradient` from this g, `decay` from λ.

Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning"; torch.optim.SGD.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from rl_training.optim.adamw import UpdateParts


@dataclass(frozen=True)
class SGDState:
    """SGD's view of one parameter BEFORE a step: its momentum and the hyperparameters of its group."""

    momentum_buffer: Tensor | None  # None before the first step, and without momentum
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    moves: bool = True  # False where the parameter got no gradient at all: torch takes no step, not even of decay

    def not_updated(self) -> SGDState:
        """Return the state of a parameter that this step does not touch."""
        return dataclasses.replace(self, lr=0.0, moves=False)

    def delta(self, param: Tensor, grad: Tensor) -> UpdateParts:
        """Return the change δθ that torch.optim.SGD would make, by cause. Nothing is modified.

        `grad` may carry leading dimensions, (..., *param.shape).

        >>> import torch
        >>> state = SGDState(None, lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)
        >>> state.delta(torch.zeros(2), torch.tensor([1.0, -2.0])).total
        tensor([-0.1000,  0.2000])
        """
        factor = self.gradient_factor(param, grad)
        buffer = self.momentum_buffer
        buffer_factor = self.momentum**2 if self.nesterov else self.momentum
        momentum = (-self.lr * buffer_factor) * buffer if buffer is not None else 0.0 * param
        return UpdateParts(momentum=momentum, gradient=factor * grad, decay=(factor * self.weight_decay) * param)

    def total(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the sum of the parts of `delta`."""
        return self.delta(param, grad).total

    def gradient_factor(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the factor a, (), for which `delta(param, grad).gradient` is a · grad."""
        inflow = 1.0 if self.momentum_buffer is None else 1.0 - self.dampening  # the share of d that enters b
        if self.momentum == 0.0:
            return param.new_tensor(-self.lr)
        return param.new_tensor(-self.lr * (1.0 + self.momentum * inflow if self.nesterov else inflow))
