"""The optimizer's updates in pieces, with and without each fold, and the update that is kept for the next step."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_steps import ALONE, draw, fold_vectors_of, shard_of
from library_optimizers import Trained, as_doubles, name_of, settings_of
from torch import Tensor, nn

from rl_training.entropy.data import PRODUCTS, EntropyPrediction, EntropySettings
from rl_training.entropy.previous_update import STEP_NOT_MEASURED, PreviousUpdate, UpdateState
from rl_training.errors import UserError
from rl_training.optim.formula import OptimizerState, StepFormula
from rl_training.optim.leave_one_out import FoldMeans, LeaveOneOutUpdates
from rl_training.optim.sgd import SGDState
from rl_training.optim.state import view_optimizer
from rl_training.optim.supported import FORMULAS
from rl_training.optim.updates import OptimizerPieces, StepUpdate, clip_coefficient, compute_update
from rl_training.parallel import vectors
from rl_training.parallel.sharding import Shard
from rl_training.parallel.state_tensors import from_tensors, to_tensors
from rl_training.parallel.vectors import Layout

SHAPES = {"a": (3, 2), "b": (4,), "c": (5,), "large": (7, 3), "d": (2, 2), "e": (1,)}
LARGE = 20  # maximum number of entries that are joined, in these tests
of_every_optimizer = pytest.mark.parametrize("formula", FORMULAS, ids=name_of)


def drawn(formula: StepFormula) -> tuple[dict[str, Tensor], dict[str, OptimizerState]]:
    """Return parameters and states, fp64. c, large, d and e have no weight decay, and d has had no gradient yet."""
    trained = Trained(formula, settings_of(formula)[0], SHAPES, undecayed=("c", "large", "d", "e"))
    for _ in range(3):
        trained.step(without=("d",))
    parameters = {name: param.detach().double().flatten() for name, param in trained.model.items()}
    return parameters, {name: as_doubles(state) for name, state in trained.states().items()}


@of_every_optimizer
@pytest.mark.parametrize("longest", [21, 8])
def test_the_update_in_pieces_equals_the_updates_of_single_parameters(
    formula: StepFormula, longest: int, monkeypatch
) -> None:
    """Similar small neighbours are one piece (AdamW: even if weight decay differs). Longer than `longest` is split."""
    monkeypatch.setattr(vectors, "CHUNK_SIZE_CPU", LARGE)
    parameters, states = drawn(formula)
    layout = dataclasses.replace(Layout.of(parameters), chunk_size=longest)
    gradients = {name: draw(len(param)) for name, param in parameters.items()}
    by_parameter = {name: states[name].delta(parameters[name], gradients[name]) for name in SHAPES}
    step = torch.cat(layout.vector(parts.total for parts in by_parameter.values()))
    gradient = layout.vector(gradients.values())

    pieces = list(OptimizerPieces(layout, parameters, states))
    if longest == 21:
        small = [15] if states["a"].can_join_decays else [10, 5]
        assert [len(piece.param) for piece in pieces] == [*small, 21, 4, 1]
    else:
        assert max(len(piece.param) for piece in pieces) == longest
    joined = torch.cat([piece.state.delta(piece.param, piece.of(gradient)).total for piece in pieces])
    torch.testing.assert_close(joined, step)
    update = StepUpdate(OptimizerPieces(layout, parameters, states), gradient, clip=1.0)
    torch.testing.assert_close(torch.cat(compute_update(layout, update)), step)
    halves = list(OptimizerPieces(layout, parameters, states).halved())
    assert max(len(piece.param) for piece in halves) == longest // 2
    halved = torch.cat([piece.state.delta(piece.param, piece.of(gradient)).total for piece in halves])
    torch.testing.assert_close(halved, step)
    names = list(SHAPES)
    for piece in [*pieces, *halves]:
        for name, entries in zip(names[piece.parameter_indices], piece.of(gradient).split(piece.sizes), strict=True):
            assert set(entries.tolist()) <= set(gradients[name].flatten().tolist())


@pytest.mark.parametrize("max_grad_norm", [math.inf, 0.5])
@of_every_optimizer
def test_updates_without_a_fold_are_those_of_the_other_folds(
    max_grad_norm: float, formula: StepFormula, monkeypatch
) -> None:
    """Three folds of different sizes: for each, gradient, clipping by its norm, and step of the other two."""
    monkeypatch.setattr(vectors, "CHUNK_SIZE_CPU", LARGE)
    parameters, states = drawn(formula)
    sizes = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    layout = Layout.of(parameters)
    by_fold = [draw(3, bucket.size) for bucket in layout.buckets]
    mean = [(sizes.unsqueeze(1) * part).sum(dim=0) / 8 for part in by_fold]
    layout = dataclasses.replace(layout, chunk_size=8)
    pieces = OptimizerPieces(layout, parameters, states)
    steps = LeaveOneOutUpdates(
        pieces, FoldMeans.of(mean, fold_vectors_of(layout, by_fold), sizes), max_grad_norm, ALONE
    )
    assert steps.is_clipped == (max_grad_norm < math.inf)  # although the step itself is not
    for k in range(3):
        others = [i for i in range(3) if i != k]
        mean_of_others = sum(sizes[i] * torch.cat([part[i] for part in by_fold]) for i in others) / sizes[others].sum()
        clip = min(1.0, max_grad_norm / (float(mean_of_others.norm()) + 1e-6))
        assert float(steps.clips[k]) == pytest.approx(clip, rel=1e-12)
        named = layout.by_name(layout.split(clip * mean_of_others))
        expected = [state.delta(parameters[name], named[name]).total for name, state in states.items()]
        without_fold = torch.cat([piece.delta(steps.clipped.without(k, piece)).total for piece in steps.pieces])
        torch.testing.assert_close(without_fold, torch.cat(expected))


def test_an_update_without_the_dominant_fold_is_clipped_by_its_own_norm() -> None:
    """In fp32 the squared norms cancel to less than their rounding error, or below 0."""
    generator = torch.Generator().manual_seed(0)
    sizes, reason = torch.full((8,), 4.0, dtype=torch.float64), 1e-5
    for others in (0.0, 1e-9, 1e-5, 1e-3):
        vectors = others * torch.randn(8, 20000, generator=generator)
        vectors[3] = torch.randn(20000, generator=generator)
        mean = vectors.mean(dim=0)
        weights = {"w": torch.zeros(20000)}
        pieces = OptimizerPieces(Layout.of(weights), weights, {"w": SGDState(None, 0.1, 0.0, 0.0, 0.0, nesterov=False)})
        steps = LeaveOneOutUpdates(
            pieces, FoldMeans.of([mean], fold_vectors_of(Layout.of(weights), [vectors]), sizes), reason, ALONE
        )
        made = [
            torch.cat([piece.delta(steps.clipped.without(k, piece)).total for piece in steps.pieces]).double()
            for k in (3, 0)
        ]
        for step, clip in zip(made, steps.clips[[3, 0]].tolist(), strict=True):
            unclipped = step.norm() / clip / 0.1  # norm of the gradient that makes the step
            assert clip == pytest.approx(min(1.0, reason / (float(unclipped) + 1e-6)), rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "settings", "alike"),
    [
        (torch.optim.AdamW, {"betas": (0.9, 0.99), "fused": True}, 0.999),
        (torch.optim.AdamW, {"betas": (0.9, 0.99)}, 0.97),  # torch rounds intermediate results
        (torch.optim.SGD, {"momentum": 0.9}, 0.97),
    ],
)
@pytest.mark.parametrize("rate", [1e-5, 1e-3])
def test_steps_of_bf16_weights_equal_those_of_torch(optimizer: Any, settings: Any, alike: float, rate) -> None:
    """They agree in nearly all entries that move, starting from the bf16 moments that torch keeps."""
    torch.manual_seed(0)
    model = nn.Module()
    model.w = nn.Parameter((0.05 * torch.randn(20000)).bfloat16())
    stepping = optimizer([model.w], lr=rate, weight_decay=0.01, **settings)
    shard = Shard(model, stepping, None)
    for _ in range(4):
        model.w.grad = 0.3 * torch.randn_like(model.w)
        gradient, before, weights = model.w.grad.float(), model.w.detach().float(), shard.weights()
        (piece,) = OptimizerPieces(Layout.of(weights), weights, view_optimizer(shard).states)
        parts = piece.delta(gradient)
        torch.testing.assert_close(piece.gradient_factor(gradient) * gradient, parts.gradient)
        stepping.step()
        moved = model.w.detach().float() - before
        moves = (moved != 0) | (parts.total != 0)
        assert moves.sum() > 40
        assert torch.isclose(moved, parts.total, rtol=1e-5, atol=0.0)[moves].float().mean() > alike


def history_of(entries: int, state: UpdateState | None = None) -> PreviousUpdate:
    parameters = {"w": torch.zeros(entries)}
    return PreviousUpdate(shard_of(parameters), state)


def advance(
    history: PreviousUpdate, number: int, update: StepUpdate | None, weights: dict[str, Tensor]
) -> EntropyPrediction:
    """Put a step's δθ in the place of the last one."""
    step: Any = SimpleNamespace(number=number, weights=weights, optimizer=SimpleNamespace(rounding_reason=None))
    return history.advance(step, EntropyPrediction(EntropySettings(), labels=()), update)


def advance_by(history: PreviousUpdate, number: int, update: list[Tensor]) -> None:
    """Put this δθ in the place of the last one."""
    weights = {"w": torch.zeros(len(update[0]))}
    pieces = OptimizerPieces(Layout.of(weights), weights, None)
    advance(history, number, StepUpdate(pieces, update, 1.0, vector=update), weights)


def test_an_update_is_kept_for_one_step_and_survives_a_restart() -> None:
    history, update = history_of(3), [torch.tensor([1.0, -2.0, 0.5])]
    assert history.reason(1).code == "first_step"
    advance_by(history, 4, update)
    state = from_tensors(UpdateState(), to_tensors(history.state))
    for kept in (history, history_of(3, state)):
        assert kept.update_before(5)[0].tolist() == [1.0, -2.0, 0.5]
        assert kept.reason(5) is None
        assert kept.update_before(6) is None
        assert kept.reason(6) == STEP_NOT_MEASURED.formatted(step=5)
    with pytest.raises(UserError, match="the 2 numbers"):
        history_of(2, state)


def test_an_update_that_is_no_vector_is_written_over_the_previous_one() -> None:
    history, weights = history_of(3), {"w": torch.zeros(3)}
    advance_by(history, 1, [torch.ones(3)])
    previous = history.update_before(2)
    pieces = OptimizerPieces(Layout.of(weights), weights, {"w": SGDState(None, 0.1, 0.0, 0.0, 0.0, nesterov=False)})
    prediction = advance(history, 2, StepUpdate(pieces, [torch.ones(3)], clip=1.0), weights)
    assert prediction.update[0] is prediction.unrounded_update[0] is previous[0]
    assert history.update_before(3)[0].tolist() == pytest.approx([-0.1] * 3)


def test_a_state_that_lacks_the_update_of_its_step_is_refused() -> None:
    """A process without entries would treat it as no update, and then miss the collectives of the others."""
    with pytest.raises(UserError, match="the 3 numbers"):
        history_of(3, UpdateState(step=4))


def test_a_step_that_fails_verification_adds_only_the_backward_error_to_averages() -> None:
    """Backward is the product with the previous step, so this step does not matter."""
    history, averages = history_of(3), []
    for step, is_formula in enumerate((True, False, True), start=1):
        variance = torch.full((1,), 4.0**step, dtype=torch.float64)
        flat = variance.repeat(len(PRODUCTS))
        averages.append(history.errors.add(flat, step, decay=0.5).average(decay=0.5)[0].tolist())
        history.add_errors(dict.fromkeys(PRODUCTS, variance), step, decay=0.5, is_formula=is_formula)
    kept = [4.0, (0.5 * 4 + 16) / 1.5, (0.25 * 4 + 0.5 * 16 + 64) / 1.75]
    lost = [4.0, (0.5 * 4 + 16) / 1.5, (0.25 * 4 + 64) / 1.25]
    for number, name in enumerate(PRODUCTS):
        expected = kept if name == "backward" else lost
        assert [average[number] for average in averages] == pytest.approx(expected)


def test_a_step_without_a_formula_is_the_parameter_difference_after_it() -> None:
    history = history_of(2)
    weights = {"w": torch.tensor([1.0, 2.0])}
    advance(history, 1, None, weights)
    weights["w"] += torch.tensor([0.25, -1.0])
    history.finish(1, weights)
    weights["w"] += 1.0
    history.finish(1, weights)  # only the first call counts
    assert history.update_before(2)[0].tolist() == [0.25, -1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("max_norm", [1e-4, 0.7, 1.3, 1e6, float("inf")])
def test_the_clip_coefficient_equals_torchs_clipping(max_norm: float, dtype: torch.dtype) -> None:
    """These gradients have norm √0.91: smaller thresholds scale them, larger ones do not."""
    grads = [
        torch.full((2, 3), 0.3, dtype=dtype),
        torch.full((), -0.6, dtype=dtype),
        torch.full((1,), 0.1, dtype=dtype),
    ]
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    assert float(norm) == pytest.approx(0.91**0.5, rel=1e-6)
    coefficient = clip_coefficient(norm, max_norm)
    for p, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(coefficient * grad, p.grad, rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert (float(coefficient) < 1) == (max_norm < 0.95)


def test_each_norm_has_its_own_clip_coefficient() -> None:
    """The coefficient is min(1, 2/(norm + 1e-6)): norms 0 and 1 are not scaled, and 4 is halved."""
    norms = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    expected = torch.tensor([1.0, 1.0, 2.0 / 4.000001], dtype=torch.float64)
    torch.testing.assert_close(clip_coefficient(norms, 2.0), expected, rtol=1e-15, atol=0)
