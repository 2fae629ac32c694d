"""SGD's step is the one that torch takes, and its parts add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_training.optim.sgd import SGDState


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.0, "dampening": 0.0, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.0, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.5, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.0, "nesterov": True},
    ],
)
def test_the_first_steps_of_sgd_are_those_of_torch(settings: dict[str, Any]) -> None:
    """The first one takes the gradient whole, dampened or not: the momentum that torch then keeps is the gradient."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.SGD([param], lr=0.1, weight_decay=0.3, **settings)
    for _ in range(3):
        buffer = optimizer.state[param].get("momentum_buffer")
        before, grad = param.detach().clone(), torch.randn(5, generator=generator, dtype=torch.float64)
        state = SGDState(None if buffer is None else buffer.clone(), lr=0.1, weight_decay=0.3, **settings)
        parts = state.delta(before, grad)
        param.grad = grad.clone()
        optimizer.step()
        torch.testing.assert_close(parts.total, param.detach() - before, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(parts.momentum + parts.gradient + parts.decay, parts.total, rtol=1e-12, atol=1e-15)
