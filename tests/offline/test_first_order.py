"""Steps with other preconditioners agree with the formulas, written out entry by entry."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training.offline.first_order import compare_preconditioners
from rl_training.optim.adamw import AdamWState
from rl_training.optim.updates import OptimizerPieces, StepUpdate, compute_update
from rl_training.parallel.vectors import Layout

BETAS, EPS, RATE, DECAY, STEPS, CLIP = (0.8, 0.9), 1e-2, 0.1, 0.2, 3, 0.5
G, M, V = [0.6, -2.0, 1.0], [0.5, 0.3, -0.2], [0.04, 0.25, 1.0]  # two tensors, the first with two entries
THETA, X = [1.0, -1.0, 2.0], [[1.0, 2.0, -0.5], [-3.0, 0.5, 1.0]]


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def asked() -> tuple[Any, Any, list[list[Tensor]]]:
    """Return a trainer of two tensors, its step for the gradient G, and X̄."""
    spans = {"first": slice(0, 2), "second": slice(2, 3)}
    parameters = {name: vector(THETA[span]) for name, span in spans.items()}
    states = {
        name: AdamWState(vector(M[span]), vector(V[span]), STEPS, RATE, BETAS, EPS, DECAY)
        for name, span in spans.items()
    }
    layout = Layout.of(parameters)
    whole = StepUpdate(OptimizerPieces(layout, parameters, states), [vector(G)], CLIP)
    update = SimpleNamespace(gradient=[vector(G)], delta=compute_update(layout, whole), whole=whole)
    sizes = SimpleNamespace(numel=lambda name: len(parameters[name]))
    optimizer = SimpleNamespace(states=states)
    restored = SimpleNamespace(layout=layout, shard=sizes, optimizer=optimizer, reduce=torch.clone)
    return restored, update, [[vector(x)] for x in X]


def written_out() -> dict[str, list[float]]:
    """Return the directions by name, computed from Adam's formulas one entry at a time."""
    g = [CLIP * value for value in G]
    m = [0.8 * old + 0.2 * new for old, new in zip(M, g, strict=True)]
    root = [math.sqrt((0.9 * old + 0.1 * new**2) / (1 - 0.9**4)) for old, new in zip(V, g, strict=True)]
    rms = [math.sqrt((root[0] ** 2 + root[1] ** 2) / 2)] * 2 + [root[2]]
    return {
        "momentum-free adam": [-new / (r + EPS) for new, r in zip(g, root, strict=True)],
        "rms-only": [-mean / r for mean, r in zip(m, rms, strict=True)],
        "identity": [-mean for mean in m],
        "sgd": [-new for new in g],
    }


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", written_out())
def test_each_direction_is_scaled_to_the_real_steps_length_or_gain(name: str) -> None:
    restored, update, direction = asked()
    row = {row["name"]: row for row in compare_preconditioners(restored, update, direction)}[name]
    step, real, g = written_out()[name], update.delta[0].tolist(), [CLIP * value for value in G]
    length = math.sqrt(dot(real, real) / dot(step, step))
    assert row["delta_h1"] == pytest.approx(length * dot(X[0], step), rel=1e-9)
    assert row["delta_h1_sequence"] == pytest.approx(length * dot(X[1], step), rel=1e-9)
    assert row["delta_h1_same_gain"] == pytest.approx(dot(g, real) / dot(g, step) * dot(X[0], step), rel=1e-9)
    assert row["cosine"] == pytest.approx(dot(real, step) / math.sqrt(dot(real, real) * dot(step, step)), rel=1e-9)
