"""The optimizers in the table of supported.py, from their libraries, and the states that the package reads."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from rl_training.optim.formula import OptimizerState, StepFormula
from rl_training.optim.state import view_optimizer
from rl_training.optim.supported import FORMULAS
from rl_training.parallel.sharding import Shard

ORDINARY: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.3}
# By full name: settings that lead through another branch of the step, each used instead of the default settings.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "torch.optim.adamw.AdamW": [ORDINARY, {"lr": 1e-3, "betas": (0.0, 0.9), "eps": 1e-3, "weight_decay": 0.0}],
    "torch.optim.sgd.SGD": [
        ORDINARY | {"momentum": 0.9}, ORDINARY, ORDINARY | {"momentum": 0.9, "dampening": 0.5},
        ORDINARY | {"momentum": 0.9, "nesterov": True},
    ],
}  # fmt: skip


def settings_of(formula: StepFormula) -> list[dict[str, Any]]:
    return SETTINGS.get(formula.optimizer, [ORDINARY])


CASES = [(formula, settings) for formula in FORMULAS for settings in settings_of(formula)]


def name_of(formula: StepFormula) -> str:
    return formula.optimizer.rpartition(".")[2]


class Trained:
    """Parameters of the given shapes and their optimizer: fp64 for torch's optimizers, fp32 for another library's.

    Args:
        undecayed: Names of parameters without weight decay.
    """

    def __init__(
        self,
        formula: StepFormula,
        settings: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        undecayed: Collection[str] = (),
    ) -> None:
        module, _, name = formula.optimizer.rpartition(".")
        library = pytest.importorskip(module.partition(".")[0])
        dtype = torch.float64 if library is torch else torch.float32
        torch.manual_seed(0)
        self.model = nn.ParameterDict()  # filled one by one to keep the order: it would sort a dictionary by name
        for parameter, shape in shapes.items():
            self.model[parameter] = nn.Parameter(torch.randn(shape, dtype=dtype))
        decayed = [param for name, param in self.model.items() if name not in undecayed]
        others = {"params": [self.model[name] for name in undecayed], "weight_decay": 0.0}
        optimizer = getattr(importlib.import_module(module), name)
        self.optimizer = optimizer([{"params": decayed}, *([others] if undecayed else [])], **settings)

    def step(self, without: tuple[str, ...] = ()) -> None:
        """Take a step with random gradients; the parameters in `without` get none."""
        for name, param in self.model.items():
            param.grad = None if name in without else torch.randn_like(param)
        self.optimizer.step()

    def states(self) -> dict[str, OptimizerState]:
        """Return the state that the package reads for each parameter."""
        states = view_optimizer(Shard(self.model, self.optimizer, None)).states
        assert states is not None
        return dict(states)


def as_doubles(state: OptimizerState) -> OptimizerState:
    """Return a state whose tensors are fp64."""
    moments = {name: value.double() for name, value in vars(state).items() if isinstance(value, torch.Tensor)}
    return state.replace(**moments)
