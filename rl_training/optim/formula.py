"""The contract of an optimizer whose step is a formula.

An optimizer is one file of this folder and one line in supported.py. The file has an `OptimizerState`, which calculates
the step of a parameter, and a `StepFormula`, which says whose step that is and reads the state. sgd.py is the shortest.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from rl_training.statistics.limit import Limit


class UpdateParts(NamedTuple):
    """The parts of a parameter's change by cause, which add up to the change."""

    momentum: Tensor  # from the moments before the step
    gradient: Tensor  # from this step's gradient
    decay: Tensor  # from weight decay

    @property
    def total(self) -> Tensor:
        return (self.momentum + self.gradient).add_(self.decay)


class OptimizerState(abc.ABC):
    """One parameter BEFORE a step: its moments, and the hyperparameters of its group.

    Subclasses are frozen dataclasses. Their tensors have the parameter's shape: neighbouring parameters that differ in
    their tensors alone are joined to one vector, and large ones are cut, so the step must be elementwise.
    """

    # Share of its norm by which a step may differ from `total` before it counts as another one.
    error_limit: ClassVar[float] = 1e-3

    lr: float
    weight_decay: float | Tensor  # a number per parameter, or with `joins_decays` perhaps one per entry
    moves: bool  # False where the parameter got no gradient at all: torch takes no step, not even of decay

    @abc.abstractmethod
    def delta(self, param: Tensor, grad: Tensor) -> UpdateParts:
        """Return the change that the optimizer would make with this gradient, by cause. Nothing is modified.

        Args:
            param: before the step.
            grad: after clipping, (..., *param.shape). Each entry of the leading dimensions is a separate step from the
                same state, as leave-fold-out needs.
        """

    def total(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the sum of the parts of `delta`. This is a hot path: override it where fewer passes are enough."""
        return self.delta(param, grad).total

    @abc.abstractmethod
    def gradient_factor(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the factor a ≤ 0, elementwise or (), for which `delta(param, grad).gradient` is a · grad."""

    @property
    @abc.abstractmethod
    def is_fresh(self) -> bool:
        """Whether no step has been taken yet: the moments are missing or zero."""

    @property
    @abc.abstractmethod
    def steady_state_factor(self) -> float:
        """What a step does once all of the momentum includes a change of gradients, as a multiple of its effect now."""

    @property
    def goes_by_sign(self) -> bool:
        """Whether the size of this step does not depend on the gradient's, so that no part of it has a share."""
        return False

    @property
    def joins_decays(self) -> bool:
        """Whether parameters may be joined whose `weight_decay` differs, which is a tensor then."""
        return False

    @property
    def remark(self) -> str:
        """What the user should know of these moments when a training begins; "" for nothing."""
        return ""

    def preconditioner(self) -> Tensor | None:
        """Return P of the step BEFORE, (n,), in whose metric gradients are measured; None where it is no metric."""
        return None

    def not_updated(self) -> Self:
        """Return the state of a parameter that this step does not touch."""
        return self.replace(lr=0.0, moves=False)

    def replace(self, **fields: Any) -> Self:
        """Return the state with other values of these fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[type-var]


def no_limit(optimizer: torch.optim.Optimizer) -> Limit | None:
    """Return None: any setting of the optimizer has a formula."""
    return None


@dataclass(frozen=True)
class StepFormula:
    """Whose step is calculated, and how its state is read."""

    optimizer: str  # the full name of the class, whose library need not be installed
    # From the weights (n,), the optimizer's state of them, empty before the first step, and their parameter group.
    read: Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], OptimizerState]
    limit: Callable[[torch.optim.Optimizer], Limit | None] = no_limit  # why these settings have no formula
