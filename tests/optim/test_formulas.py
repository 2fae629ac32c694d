"""Claims on every optimizer in the table of supported.py: its formula gives the parts of its library's step.

An optimizer that is added to the table is tested with a typical rate and decay, and with its entry in SETTINGS of
support/library_optimizers.py.
"""

from __future__ import annotations

import pytest
import torch
from library_optimizers import CASES, Trained, as_doubles, name_of

from rl_training.optim.adamw import SMOOTH_STEPS, AdamWState
from rl_training.optim.formula import OptimizerState
from rl_training.optim.state import view_optimizer
from rl_training.parallel.sharding import Shard

SHAPES = {"w": (40,)}
of_every_optimizer = pytest.mark.parametrize(
    ("formula", "settings"), CASES, ids=[f"{name_of(formula)} {', '.join(settings)}" for formula, settings in CASES]
)


@of_every_optimizer
def test_the_steps_of_a_formula_equal_those_of_the_library_from_the_first(formula, settings) -> None:
    """Up to rounding of the parameters and the parts. One entry never has a gradient."""
    trained = Trained(formula, settings, SHAPES)
    weights = trained.model["w"]
    for step in range(4):
        weights.grad = 10.0 ** (1 - step) * torch.randn_like(weights)
        weights.grad[3] = 0.0
        before, (state,) = weights.detach().clone(), trained.states().values()
        parts, total = state.delta(before, weights.grad), state.total(before, weights.grad)
        assert not state.is_fresh or step == 0
        trained.optimizer.step()
        moved = weights.detach() - before
        rounding = torch.finfo(before.dtype).eps * (2 * before.abs() + 16 * sum(part.abs() for part in parts))
        assert ((moved - total).abs() <= rounding).all()
        assert ((moved - parts.total).abs() <= rounding).all()
        assert moved.count_nonzero() > 30


@of_every_optimizer
def test_the_gradient_part_is_a_non_positive_factor_times_the_gradient(formula, settings) -> None:
    trained = Trained(formula, settings, SHAPES)
    for _ in range(3):
        trained.step()
    (state,), param = trained.states().values(), trained.model["w"].detach()
    grads = 3.0 * torch.randn(3, *SHAPES["w"]).to(param)
    factor, parts = state.gradient_factor(param, grads), state.delta(param, grads)
    assert (factor <= 0).all()
    torch.testing.assert_close(factor * grads, parts.gradient)
    assert parts.gradient.any()


def derivative_by_autograd(state, param, grad) -> tuple[torch.Tensor, ...]:
    """Return the derivative of each part by the gradient. The step is elementwise."""
    return torch.func.jvp(lambda g: tuple(state.delta(param, g)), (grad,), (torch.ones_like(grad),))[1]


@of_every_optimizer
def test_products_and_derivatives_of_the_parts_are_those_of_the_definition(formula, settings) -> None:
    """Also where neither gradient nor moments are, and below the range of squares."""
    trained = Trained(formula, settings, SHAPES)
    for step in range(SMOOTH_STEPS + 2):
        (state,), param = trained.states().values(), trained.model["w"].detach()
        state, param = as_doubles(state), param.double()
        x, grads = torch.randn(2, 3, *SHAPES["w"], dtype=torch.float64)
        grads[0, 4] = 1e-200
        parts = state.delta(param, grads)
        for product, part in zip(state.products(param, grads, x), parts, strict=True):
            torch.testing.assert_close((product.factor * product.left * product.right).expand_as(x), x * part)
        has_derivative = type(state).derivative is not OptimizerState.derivative
        is_early = isinstance(state, AdamWState) and 0 < step < SMOOTH_STEPS
        assert state.is_smooth == (has_derivative and not state.is_sign_based and not is_early)
        slopes = state.derivative(param, grads[0]) if state.is_smooth else ()
        for slope, expected in zip(slopes, derivative_by_autograd(state, param, grads[0]), strict=False):
            got = torch.zeros_like(param) if slope is None else slope
            torch.testing.assert_close(got[5:], expected[5:])
            assert got.isfinite().all()
        weights = trained.model["w"]
        weights.grad = torch.randn_like(weights)
        weights.grad[3] = 0.0
        trained.optimizer.step()


@of_every_optimizer
def test_several_gradients_give_separate_steps_and_nothing_is_modified(formula, settings) -> None:
    trained = Trained(formula, settings, SHAPES)
    for _ in range(3):
        trained.step()
    (state,), param = trained.states().values(), trained.model["w"].detach()
    grads = torch.randn(2, 3, *SHAPES["w"]).to(param)
    given = [param, grads, *(value for value in vars(state).values() if isinstance(value, torch.Tensor))]
    copies = [tensor.clone() for tensor in given]
    together, parts = state.total(param, grads), state.delta(param, grads)
    torch.testing.assert_close(together, parts.total)
    for i, j in [(0, 0), (0, 2), (1, 1)]:
        torch.testing.assert_close(together[i, j], state.total(param, grads[i, j]))
        torch.testing.assert_close(parts.total[i, j], state.delta(param, grads[i, j]).total)
    assert all(map(torch.equal, given, copies))


@of_every_optimizer
def test_a_parameter_without_any_gradient_does_not_move(formula, settings) -> None:
    """Despite momentum and decay, like in the library."""
    trained = Trained(formula, settings, SHAPES)
    for _ in range(3):
        trained.step()
    (state,), before = trained.states().values(), trained.model["w"].detach().clone()
    trained.step(without=("w",))
    assert torch.equal(trained.model["w"], before)
    assert not state.not_updated().total(before, torch.zeros_like(before)).any()
    assert not state.not_updated().is_sign_based


@pytest.mark.parametrize(
    ("name", "setting", "code"),
    [
        ("AdamW", "amsgrad", "no_amsgrad_formula"),
        ("Adam", "maximize", "no_maximize_formula"),
        ("SGD", "maximize", "no_maximize_formula"),
    ],
)
def test_a_setting_without_a_formula_is_a_reason_that_names_its_value_with_one(name, setting, code) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **{setting: True})
    view = view_optimizer(Shard(model, optimizer, None))
    assert view.states is None
    assert view.reason.code == code
    assert f"{setting}=False" in view.reason.fix
