"""What SGD's formula claims beyond its steps, which test_formulas.py compares with torch's."""

from __future__ import annotations

import pytest
import torch

from rl_training.optim.sgd import SGD


@pytest.mark.parametrize("steps_before", [0, 1, 40])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dampening": 0.5},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.6, "nesterov": True},
    ],
)
def test_the_steady_state_factor_is_what_torch_makes_of_a_lasting_gradient_change(settings, steps_before) -> None:
    """Its effect on a late step over its effect on the step at which it begins."""
    updates = []
    for lasting_change in (0.0, 1.0):
        weights = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([weights], lr=0.1, **settings)
        for number in range(steps_before + 400):
            if number == steps_before:
                state = SGD.read(weights, optimizer.state.get(weights, {}), optimizer.param_groups[0])
            weights.grad = torch.full_like(weights, 2.0 + lasting_change * (number >= steps_before))
            before = weights.detach().clone()
            optimizer.step()
            updates.append(float(weights.detach() - before))
    plain, changed = torch.tensor(updates).view(2, -1)
    first, last = (changed - plain)[[steps_before, -1]].tolist()
    assert state.steady_state_factor == pytest.approx(last / first, rel=1e-5)
