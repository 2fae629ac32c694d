"""Compiled passes over vectors give what uncompiled ones give, and where nothing compiles, these run instead."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from example_steps import ALONE
from torch import Tensor

from rl_training.entropy.attribution import Attribution
from rl_training.entropy.data import EntropySettings
from rl_training.entropy.products import FoldProducts, _products_of_fold
from rl_training.optim.adamw import SMOOTH_STEPS, AdamWState
from rl_training.optim.formula import OptimizerState
from rl_training.optim.leave_one_out import FoldMeans, LeaveOneOutUpdates
from rl_training.optim.lion import LionState
from rl_training.optim.sgd import SGDState
from rl_training.optim.updates import OptimizerPieces, StepUpdate, clip_factors, compute_update
from rl_training.parallel import fusion as fusion_module
from rl_training.parallel import vectors
from rl_training.parallel.fold_vectors import BLOCK as FOLD_BLOCK
from rl_training.parallel.fold_vectors import FoldVectors
from rl_training.parallel.fusion import BLOCK, Fusion, Product
from rl_training.parallel.vectors import Layout

SIZES = {"a": 3 * FOLD_BLOCK, "b": BLOCK, "c": 5 * BLOCK, "odd": 70, "large": 40 * BLOCK}
FOLDS = 3


@pytest.fixture
def compiler(monkeypatch) -> None:
    """Allow torch.compile, which the suite switches off."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def state_of(kind: str, size: int, decay: float, step: int) -> OptimizerState:
    m, v = 0.1 * torch.randn(size), 0.1 * torch.randn(size).square()
    if kind == "sgd":
        return SGDState(m, lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=decay, nesterov=False)
    if kind == "lion":
        return LionState(m, step, lr=1e-2, betas=(0.9, 0.99), weight_decay=decay)
    return AdamWState(m, v, step, 1e-2, (0.9, 0.99), 1e-8, decay, decoupled=kind == "adamw")


def results(fusion: Fusion, kind: str, step: int, fold_dtype: torch.dtype, weights_dtype: torch.dtype) -> list[Tensor]:
    """Return everything that a step calculates of its vectors: clipping factors, products, corrections and update."""
    torch.manual_seed(0)
    weights = {name: torch.randn(size, dtype=weights_dtype) for name, size in SIZES.items()}
    layout = dataclasses.replace(Layout.of(weights), fusion=fusion)
    states = {name: state_of(kind, size, 0.1 * (name != "b" or kind != "adamw"), step) for name, size in SIZES.items()}
    by_fold, gradients = FoldVectors(layout, FOLDS, fold_dtype), []
    for fold in range(FOLDS):
        gradients.append([torch.randn(bucket.size) for bucket in layout.buckets])
        for index, part in enumerate(gradients[-1]):
            by_fold.receiver(range(fold, fold + 1)).take(index, 0, part.unsqueeze(0))
    mean = [torch.stack(parts).mean(dim=0) for parts in zip(*gradients, strict=True)]
    limit = 0.7 * math.sqrt(sum(float(part.square().sum()) for part in mean))
    pieces = OptimizerPieces(layout, weights, states)
    whole = StepUpdate(pieces, mean, float(clip_factors(torch.tensor((limit / 0.7) ** 2), limit)))
    folds = FoldMeans.of(mean, by_fold, torch.tensor([4.0, 4.0, 2.0], dtype=torch.float64))
    updates = LeaveOneOutUpdates(pieces, folds, limit, ALONE, whole)
    previous = [torch.randn(bucket.size) for bucket in layout.buckets]
    attribution = Attribution(list(SIZES))
    products = FoldProducts(layout, folds.sizes, attribution, whole, updates, previous, EntropySettings())
    for fold, index in itertools.product(range(FOLDS), range(len(layout.buckets))):
        x = torch.randn(1, layout.buckets[index].size)
        products.receiver(0, range(fold, fold + 1)).take(index, 0, x)
    return [updates.clips, *products.sum_over_ranks(ALONE), *compute_update(layout, whole)]


def assert_same(compiled: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    for got, exact in zip(compiled, expected, strict=True):
        scale = exact.nan_to_num().abs().amax()
        torch.testing.assert_close(got, exact, rtol=tolerance, atol=tolerance * float(scale), equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "fold_dtype", "weights_dtype"),
    [
        ("adamw", torch.int8, torch.float32),
        ("adam", torch.float32, torch.bfloat16),
        ("sgd", torch.float32, torch.float32),
        ("lion", torch.float32, torch.float32),
    ],
)
def test_a_traced_step_has_the_numbers_of_an_eager_one(
    compiler, monkeypatch, kind: str, fold_dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    """Also before Adam's step is smooth. Pieces that are not whole blocks are left out."""
    monkeypatch.setattr(vectors, "CHUNK_SIZE_CPU", 20 * BLOCK)
    fusion = Fusion(is_on=True, backend="eager")
    for step in (SMOOTH_STEPS, SMOOTH_STEPS - 1)[: 1 + (kind == "adamw")]:
        settings = kind, step, fold_dtype, weights_dtype
        assert_same(results(fusion, *settings), results(Fusion(), *settings))
    assert fusion.is_on
    assert num_graphs() <= 8, "a graph for each function, and for each way in which weight decay is kept"


def test_compiled_updates_and_products_are_the_eager_ones_at_every_step_and_size(compiler) -> None:
    """By a C++ compiler, from one graph each: steps, sizes and clipping factors are its arguments."""
    compiled, eager = Fusion(is_on=True), Fusion()
    for step, blocks in ((20, 4), (21, 6), (30, 6)):
        size = blocks * BLOCK
        state = state_of("adamw", size, 0.1, step)
        layout = dataclasses.replace(Layout.of({"w": torch.randn(size)}), fusion=compiled)
        span = OptimizerPieces(layout, {"w": torch.randn(size)}, {"w": state})
        (piece,) = span
        update = StepUpdate(span, [torch.randn(size)], clip=0.1 * step)
        assert_same(compute_update(layout, update), [piece.unrounded(update.clip_tensor * update.mean[0])])
        x, mean, row = torch.randn(3, size)
        numbers = torch.randn(3) + step
        arguments = piece, x, numbers[0], None, mean, row, *numbers[1:]
        spans = (BLOCK, size - BLOCK)
        assert_same(
            [compiled.sums(_products_of_fold, spans, *arguments)], [eager.sums(_products_of_fold, spans, *arguments)]
        )
    if not compiled.is_on:
        pytest.skip("this machine has no C++ compiler")
    assert num_graphs() == 2


def square(vector: Tensor) -> Iterator[Product]:
    yield Product(1.0, vector, vector)


def test_where_nothing_compiles_functions_run_uncompiled_and_one_line_says_so(compiler, caplog) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    fusion, vector = Fusion(is_on=True), torch.arange(2.0 * BLOCK)
    fusion._backend = broken
    for _ in range(2):
        sums = fusion.sums(square, (BLOCK, BLOCK), vector)
        torch.testing.assert_close(sums, vector.double().square().view(1, 2, BLOCK).sum(dim=-1))
    assert not fusion.is_on
    (line,) = [text for name, _, text in caplog.record_tuples if name == fusion_module.__name__]
    assert line.startswith("probes run their passes over vectors uncompiled")
    assert "no compiler here" in line


def test_a_compiler_that_gives_other_numbers_is_not_used(compiler, caplog) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *values: [1.01 * result for result in graph(*values)]

    fusion, vector = Fusion(is_on=True), torch.arange(2.0 * BLOCK)
    fusion._backend = wrong
    sums = fusion.sums(square, (BLOCK, BLOCK), vector)
    torch.testing.assert_close(sums, vector.double().square().view(1, 2, BLOCK).sum(dim=-1))
    assert not fusion.is_on
    assert "other results, by 0.01 of their norm" in caplog.text
