"""Joining small parameters for the optimizer's arithmetic changes nothing of steps, products and parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.sgd import SGDState
from rl_training.mathematics.vectors import FlatVectors
from rl_training.engine import updates
from rl_training.engine.updates import CAUSES, optimizer_pieces, products_by_cause, products_with_step

SHAPES = {"a": (3, 2), "b": (4,), "c": (5,), "large": (7, 3), "d": (2, 2), "e": (1,)}
LARGE = 20  # entries that are joined at most, here


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def adamw(shape: tuple[int, ...], weight_decay: float, step: int) -> AdamWState:
    return AdamWState(draw(*shape), draw(*shape).square(), step, 1e-2, (0.9, 0.99), 1e-8, weight_decay)


def states_of(optimizer: str) -> dict[str, AdamWState | SGDState]:
    if optimizer == "sgd":
        return {
            n: SGDState(None if n == "c" else draw(*s), 0.1, 0.9, 0.0, 0.3, nesterov=False) for n, s in SHAPES.items()
        }
    decay_and_step = {"a": (0.1, 3), "b": (0.1, 3), "c": (0.0, 3), "large": (0.0, 3), "d": (0.0, 3), "e": (0.0, 4)}
    states = {name: adamw(shape, *decay_and_step[name]) for name, shape in SHAPES.items()}
    if optimizer == "adam":
        states = {name: dataclasses.replace(state, decoupled=False) for name, state in states.items()}
    return states


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_steps_in_pieces_are_the_steps_of_the_parameters_one_by_one(optimizer: str, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(updates, "JOINED", LARGE)
    parameters = {name: draw(*shape) for name, shape in SHAPES.items()}
    states = states_of(optimizer)
    layout = FlatVectors(parameters, num_rows=1)
    gradients = {name: draw(*shape) for name, shape in SHAPES.items()}
    alone = {name: states[name].delta(parameters[name], gradients[name]) for name in SHAPES}
    step = layout.flatten(parts.total for parts in alone.values())
    gradient, directions = layout.flatten(gradients.values()), draw(2, len(step))

    pieces = optimizer_pieces(parameters, states)
    assert [piece.columns.stop - piece.columns.start for piece in pieces] == [
        10,
        5,
        21,
        *([4, 1] if optimizer != "sgd" else [5]),
    ]
    torch.testing.assert_close(
        torch.cat([piece.state.delta(piece.param, gradient[piece.columns]).total for piece in pieces]), step
    )
    torch.testing.assert_close(products_with_step(pieces, gradient, directions), directions @ step)
    by_cause = products_by_cause(pieces, layout, gradient, step, directions)
    for i, name in enumerate(SHAPES):
        pieces_of_x = layout.split(directions)[i]
        for j, cause in enumerate(CAUSES):
            expected = pieces_of_x @ getattr(alone[name], cause).flatten()
            torch.testing.assert_close(by_cause[i, :, j], expected, msg=f"{name}, {cause}")


def test_a_large_parameter_is_not_copied(monkeypatch) -> None:
    monkeypatch.setattr(updates, "JOINED", LARGE)
    parameters = {name: draw(*shape) for name, shape in SHAPES.items()}
    (large,) = (p for p in optimizer_pieces(parameters, states_of("adamw")) if len(p.param) > LARGE)
    assert large.param.data_ptr() == parameters["large"].data_ptr()
