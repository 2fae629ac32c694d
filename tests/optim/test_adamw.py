"""Claims on AdamW's step: it is PyTorch's step, and its parts are right."""

import itertools
import math
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, nn

from rl_training.optim.adamw import AdamWState, adamw_delta
from rl_training.optim.formula import OptimizerState
from rl_training.optim.sgd import SGDState
from rl_training.optim.updates import sqrt_preconditioner
from rl_training.parallel.vectors import CHUNK_SIZE_CPU, Layout, square_norms

NUM_STEPS = 25
ZERO_GRADIENT_AT = 7
HYPERPARAMETERS: list[dict[str, Any]] = [
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    {"lr": 3e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 1e-4, "betas": (0.5, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    {"lr": 1e-2, "betas": (0.0, 0.9), "eps": 1e-3, "weight_decay": 0.01},
]
every_hyperparameter = pytest.mark.parametrize("hyper", HYPERPARAMETERS, ids=lambda h: f"lr{h['lr']}")


def random_state(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a random (param, grad, exp_avg, exp_avg_sq), as after some steps."""
    generator = torch.Generator().manual_seed(seed)
    param, grad, exp_avg, root = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    return param, 0.1 * grad, 0.05 * exp_avg, (0.1 * root).square()


@every_hyperparameter
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("variant", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_delta_equals_torchs_update_at_each_of_25_steps_from_a_cold_start(
    variant: dict[str, bool], dtype: torch.dtype, hyper: dict[str, Any]
) -> None:
    """Gradients of varying size, one step without any gradient, one element that never has one.

    θ_after − θ_before itself is rounded to an ulp of θ. Beyond that only rounding of the parts is allowed.
    """
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in ((4, 3), (5,), ())]
    optimizer = torch.optim.AdamW(params, **hyper, **variant)
    ulp = torch.finfo(dtype).eps
    for step in range(NUM_STEPS):
        size = 0.0 if step == ZERO_GRADIENT_AT else 10.0 ** (step % 5 - 3)
        before, predicted = [], []
        for p in params:
            p.grad = size * torch.randn(p.shape, generator=generator, dtype=dtype)
            p.grad.view(-1)[1:2] = 0
            state = optimizer.state[p] or {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "step": 0}
            assert int(state["step"]) == step
            before.append(p.detach().clone())
            predicted.append(
                adamw_delta(before[-1], p.grad, state["exp_avg"], state["exp_avg_sq"], int(state["step"]), **hyper)
            )
        optimizer.step()
        for p, old, parts in zip(params, before, predicted, strict=True):
            rounding = 2 * ulp * (old.abs() + p.detach().abs()) + 16 * ulp * sum(part.abs() for part in parts)
            error = (p.detach() - old - parts.total).abs()
            assert (error <= rounding).all(), f"step {step}: off by up to {(error / rounding).max():.3g} roundings"


@every_hyperparameter
@pytest.mark.parametrize("step", [0, 1, 500])
def test_each_part_equals_the_scalar_twin(hyper: dict[str, Any], step: int) -> None:
    state = random_state(17)
    parts = adamw_delta(*state, step, **hyper)
    twin = reference.adamw_step(*(x.tolist() for x in state), step, **hyper)
    for name in ("momentum", "gradient", "decay", "total"):
        expected = torch.tensor(getattr(twin, name), dtype=torch.float64)
        torch.testing.assert_close(getattr(parts, name), expected, rtol=1e-12, atol=0)


@every_hyperparameter
def test_leading_gradient_dimensions_are_separate_steps_from_one_state(hyper: dict[str, Any]) -> None:
    param, _, exp_avg, exp_avg_sq = random_state(2, 3)
    grads = torch.randn(4, 5, 2, 3, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    stacked = adamw_delta(param, grads, exp_avg, exp_avg_sq, 12, **hyper)
    assert stacked.total.shape == grads.shape
    for i, j in itertools.product(range(4), range(5)):
        flat = (x.reshape(-1).tolist() for x in (param, grads[i, j], exp_avg, exp_avg_sq))
        single = torch.tensor(reference.adamw_step(*flat, 12, **hyper).total, dtype=torch.float64).view(2, 3)
        torch.testing.assert_close(stacked.total[i, j], single, rtol=1e-11, atol=0)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_parameter_without_any_gradient_is_not_updated_as_in_torch(steps_before: int) -> None:
    """Despite momentum and decay. Its moments stay, and it adds nothing to norms in Adam's metric, cold or warm."""
    common = {"lr": 0.1, "weight_decay": 0.3}
    states: list[OptimizerState] = []
    for kind, settings in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        param = nn.Parameter(torch.randn(5, dtype=torch.float64))
        optimizer = kind([param], **common, **settings)
        for _ in range(steps_before):
            param.grad = torch.randn_like(param)
            optimizer.step()
        before, kept = (
            param.detach().clone(),
            {key: torch.as_tensor(v).clone() for key, v in optimizer.state[param].items()},
        )
        param.grad = None
        optimizer.step()
        assert torch.equal(param, before)
        assert all(torch.equal(torch.as_tensor(v), kept[key]) for key, v in optimizer.state[param].items())
        zeros = torch.zeros_like(before)
        if kind is torch.optim.AdamW:
            moments = [kept.get(key, zeros) for key in ("exp_avg", "exp_avg_sq")]
            states.append(AdamWState(*moments, steps_before, betas=(0.9, 0.999), eps=1e-8, **common))
        else:
            buffer = kept.get("momentum_buffer")
            states.append(SGDState(buffer, momentum=0.9, dampening=0.0, nesterov=False, **common))
        state = states[-1].not_updated()
        assert torch.equal(state.delta(before, zeros).total, zeros)
    layout = Layout.of({"unused": zeros})
    sqrt_metric = sqrt_preconditioner(layout, {"unused": before}, {"unused": states[0].not_updated()})
    assert square_norms(layout, [zeros.unsqueeze(0)], sqrt_metric).tolist() == [[[0.0, 0.0]]]


def test_square_norms_do_not_depend_on_how_gradients_share_buckets() -> None:
    """One large enough for its own bucket, two with the same settings, one with others, and one that is still cold."""
    sizes = {"large": CHUNK_SIZE_CPU, "one": 7, "two": 5, "other": 6, "cold": 3}
    gradients, states, expected = {}, {}, []
    for seed, (name, size) in enumerate(sizes.items()):
        generator = torch.Generator().manual_seed(seed)
        gradients[name], root = torch.randn(2, size, generator=generator, dtype=torch.float64)
        eps, step = (1e-3, 50) if name == "other" else (1e-8, 3 if name == "cold" else 20)
        states[name] = AdamWState(torch.zeros(size), root.square(), step, 1e-3, (0.9, 0.99), eps, 0.0)
        weights = 1 / (root.abs() / math.sqrt(1 - 0.99**step) + eps)
        squares = gradients[name].square()
        expected.append([float(squares.sum()), math.nan if name == "cold" else float((weights * squares).sum())])
    layout = Layout.of(gradients)
    assert [len(bucket.names) for bucket in layout.buckets] == [1, 4]
    vectors = [part.unsqueeze(0) for part in layout.vector(gradients.values())]
    (got,) = square_norms(layout, vectors, sqrt_preconditioner(layout, gradients, states)).tolist()
    assert got == [pytest.approx(pair, rel=1e-12, nan_ok=True) for pair in expected]
    assert square_norms(layout, vectors, None)[..., 1].isnan().all()
