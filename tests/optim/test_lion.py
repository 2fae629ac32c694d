"""Claims on Lion's step: it is bitsandbytes' step, and its parts and gradient factors are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from trainers import FEW

from rl_training.models.load import load_tiny
from rl_training.optim.lion import LionState
from rl_training.optim.state import view_optimizer
from rl_training.parallel.sharding import Shard
from rl_training.probes import SimpleEntropyProbe
from rl_training.statistics.unavailable import Unavailable

bitsandbytes = pytest.importorskip("bitsandbytes")
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.3}


def sign(number: float) -> float:
    return math.copysign(1.0, number) if number else 0.0


def scalar_lion(param: Tensor, grad: Tensor, exp_avg: Tensor) -> tuple[list[list[float]], list[float]]:
    """Return the changes by momentum, gradient and decay, and the new momentum, by Chen et al.'s algorithm 2."""
    changes, moments = [], []
    beta1, beta2 = SETTINGS["betas"]
    for theta, g, m in zip(param.tolist(), grad.tolist(), exp_avg.tolist(), strict=True):
        direction = sign(beta1 * m + (1 - beta1) * g)
        rate = SETTINGS["lr"]
        changes.append([-rate * sign(m), -rate * (direction - sign(m)), -rate * SETTINGS["weight_decay"] * theta])
        moments.append(beta2 * m + (1 - beta2) * g)
    return changes, moments


def drawn_state(shape: tuple[int, ...] = (40,)) -> tuple[LionState, Tensor, Tensor]:
    """Return a random state with 3 entries without momentum, parameters, and gradients with 2 zero entries."""
    generator = torch.Generator().manual_seed(0)
    exp_avg, param, grad = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    exp_avg[:3] = grad[2:4] = 0.0
    return LionState(exp_avg, 7, **SETTINGS), param, 3.0 * grad


def test_each_part_equals_the_scalar_twin_and_the_total_is_their_sum() -> None:
    state, param, grad = drawn_state()
    changes, _ = scalar_lion(param, grad, state.exp_avg)
    expected = torch.tensor(changes, dtype=torch.float64)
    parts = state.delta(param, grad)
    torch.testing.assert_close(torch.stack(parts, dim=1), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(state.total(param, grad), expected.sum(dim=1), rtol=1e-12, atol=1e-16)
    assert (parts.gradient != 0).sum() > 5  # this gradient flips some signs, but not all
    assert (parts.gradient == 0).sum() > 5


def test_the_steady_state_factor_is_the_effect_of_a_lasting_gradient_change() -> None:
    """Checked by running the momentum with and without adding 1 to every gradient."""
    beta1, beta2 = SETTINGS["betas"]
    for steps in (0, 1, 6):
        moment = 0.0
        for _ in range(steps):
            moment = beta2 * moment + (1 - beta2) * 1.0
        lasting = beta1 * moment + (1 - beta1) * 1.0
        state = LionState(torch.zeros(1), steps, **SETTINGS)
        assert state.steady_state_factor == pytest.approx(lasting / (1 - beta1), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lion_steps_equal_those_of_bitsandbytes_from_the_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.randn(500).to(dtype))
    optimizer = bitsandbytes.optim.Lion([model.w], **SETTINGS)
    exp_avg = torch.zeros(500, dtype=torch.float64)
    for steps in range(4):
        grad = torch.randn(500).to(dtype)
        model.w.grad = grad.clone()
        state = view_optimizer(Shard(model, optimizer, None)).states["w"]
        before = model.w.detach().double()
        changes, moments = scalar_lion(before, grad.double(), exp_avg)
        formula = state.total(before.float(), grad.float()).double()
        assert state.step == steps
        torch.testing.assert_close(formula, torch.tensor(changes, dtype=torch.float64).sum(dim=1), rtol=1e-5, atol=1e-9)
        optimizer.step()
        expected = (before + formula).to(dtype)
        torch.testing.assert_close(model.w.detach(), expected, rtol=2e-7 if dtype == torch.float32 else 0.0, atol=1e-7)
        exp_avg = torch.tensor(moments, dtype=torch.float64)


def test_lion_with_8_bit_or_paged_moments_has_no_formula() -> None:
    model = torch.nn.Linear(2, 2)
    for optimizer, code in (
        (bitsandbytes.optim.Lion(model.parameters(), optim_bits=8), "no_8_bit_formula"),
        (bitsandbytes.optim.Lion(model.parameters(), is_paged=True), "no_8_bit_formula"),
        (bitsandbytes.optim.Lion8bit(model.parameters()), "no_formula"),
    ):
        view = view_optimizer(Shard(model, optimizer, None))
        assert view.states is None
        assert isinstance(view.reason, Unavailable)
        assert view.reason.code == code


def test_clipped_training_with_lion_is_predicted_at_each_step(make_trainer) -> None:
    """The optimizer is chosen by its name in transformers."""
    settings = {"optim": "lion_32bit", "learning_rate": 1e-4, "max_grad_norm": 0.05, **FEW}
    trainer = make_trainer(probes=[SimpleEntropyProbe()], **settings)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "step/formula_error" in line]
    assert len(lines) == 2
    assert all(line["step/formula_error"] < 1e-6 and math.isfinite(line["delta_h/forward"]) for line in lines)


@pytest.mark.parametrize(("turned", "is_predicted"), [(1, True), (2000, False)])
def test_a_few_signs_flipped_by_rounding_do_not_fail_verification(make_trainer, turned: int, is_predicted) -> None:
    rate, model = 1e-4, load_tiny()[0]
    optimizer = bitsandbytes.optim.Lion(model.parameters(), lr=rate)

    def turn(*_: Any) -> None:
        weights = next(param for param in model.parameters() if param.numel() > turned)
        with torch.no_grad():
            weights.view(-1)[:turned] -= 2.0 * rate * weights.grad.view(-1)[:turned].sign().mul(-1.0)

    optimizer.register_step_post_hook(turn)
    trainer = make_trainer(probes=[SimpleEntropyProbe()], model=model, optimizers=(optimizer, None), max_steps=1, **FEW)
    trainer.train()
    forward = trainer.attachment.latest["delta_h/forward"]
    assert math.isfinite(forward.value) == is_predicted
    assert forward.code == ("few_folds" if is_predicted else "not_the_formula")
