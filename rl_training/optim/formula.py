"""The interface of an optimizer whose step is a formula for each entry of a parameter by itself.

Adafactor, Muon and LAMB are none: their steps need a whole matrix or its norm.

To add an optimizer, write one file in this folder and one line in supported.py. The file has an `OptimizerState`, which
calculates a parameter's step, and a `StepFormula`, which names the optimizer's class and reads its state. sgd.py is the
shortest example.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from rl_training.parallel.fusion import Product
from rl_training.statistics.unavailable import Unavailable

NO_MAXIMIZE = Unavailable("no_maximize_formula", "maximize has no formula here", "maximize=False")


class UpdateParts(NamedTuple):
    """A parameter's change split by cause. The parts add up to the change."""

    momentum: Tensor  # due to the moments before the step
    gradient: Tensor  # due to this step's gradient
    decay: Tensor  # due to weight decay

    @property
    def total(self) -> Tensor:
        return (self.momentum + self.gradient).add_(self.decay)


CAUSES = UpdateParts._fields


class OptimizerState(abc.ABC):
    """The optimizer's state of one parameter BEFORE a step: its moments, and the hyperparameters of its group.

    Subclasses are frozen dataclasses whose tensors have the parameter's shape. The step must be elementwise, because
    neighbouring parameters that differ only in their tensors are joined into one vector, and large ones are cut.
    """

    # A step that differs from `total` by more than this share of its norm did not follow the formula.
    max_error: ClassVar[float] = 1e-3

    lr: float
    weight_decay: float | Tensor  # one number per parameter; with `can_join_decays` it may be one per entry
    is_updated: bool  # False if the parameter got no gradient at all: torch then skips it, even its weight decay

    @abc.abstractmethod
    def delta(self, param: Tensor, grad: Tensor) -> UpdateParts:
        """Return the change that the optimizer would make with this gradient, by cause. Nothing is modified.

        Args:
            param: The parameter before the step.
            grad: The gradient after clipping, (..., *param.shape). Each entry of the leading dimensions is a separate
                step from the same state, which leave-fold-out needs.
        """

    def total(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the sum of the parts of `delta`. This is a hot path: override it if fewer passes are enough."""
        return self.delta(param, grad).total

    def products(self, param: Tensor, grad: Tensor, x: Tensor) -> tuple[Product, ...]:
        """Return x · δθ by cause, in the order of `UpdateParts`. This is the hottest path: override it likewise.

        Args:
            param, grad: As for `delta`.
            x: What the update is multiplied with, (..., *param.shape).
        """
        return tuple(Product(1.0, x, part) for part in self.delta(param, grad))

    @property
    def is_smooth(self) -> bool:
        """Whether a finite change of the gradient changes the step in proportion, so that `derivative` describes it.

        Adam's is, from its sixth step on; SGD's always. A step by signs never is: it is constant almost everywhere. A
        step with kinks, such as a maximum over steps, is if leaving out a fold rarely takes an entry across one.
        """
        return False

    def derivative(self, param: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the derivative of each part of `delta` by `grad`, elementwise; None where it is 0.

        It predicts how leaving out a fold changes the step. Only called if `is_smooth`.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def gradient_factor(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the factor a ≤ 0, elementwise or (), that makes `delta(param, grad).gradient` equal a · grad."""

    @property
    @abc.abstractmethod
    def is_fresh(self) -> bool:
        """Whether no step has been taken yet, so that moments are missing or zero."""

    @property
    @abc.abstractmethod
    def steady_state_factor(self) -> float:
        """A lasting gradient change's effect in the end, divided by its effect on this step.

        If all gradients from now on change by ε: a step's change once momentum holds only changed ones, divided by this
        step's.
        """

    @property
    def is_sign_based(self) -> bool:
        """Whether this step's size does not depend on the gradient's, so that no part of the gradient has a share."""
        return False

    @property
    def can_join_decays(self) -> bool:
        """Whether parameters with different `weight_decay` may be joined, which makes it a tensor."""
        return False

    @property
    def remark(self) -> str:
        """A remark on these moments for the user when training begins; "" for none."""
        return ""

    def preconditioner(self) -> Tensor | None:
        """Return P of the step BEFORE, (n,), the metric that gradients are measured in; None if there is none."""
        return None

    def not_updated(self) -> Self:
        """Return the state of a parameter that this step does not update."""
        return self.replace(lr=0.0, is_updated=False)

    def replace(self, **fields: Any) -> Self:
        """Return the state with these fields replaced."""
        return dataclasses.replace(self, **fields)  # type: ignore[type-var]


@dataclass(frozen=True)
class StepFormula:
    """The class of optimizer whose step is calculated, and how its state is read."""

    optimizer: str  # the full name of the class; its library need not be installed
    # Reads (weights, (n,); the optimizer's state of them, empty before the first step; their parameter group).
    read: Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], OptimizerState]
    reason: Callable[[torch.optim.Optimizer], Unavailable | None]  # returns why its settings have no formula


def maximize_reason(optimizer: torch.optim.Optimizer) -> Unavailable | None:
    """Return the reason why a step of torch's that goes up the gradient (`maximize`) has no formula, or None."""
    return NO_MAXIMIZE if any(group["maximize"] for group in optimizer.param_groups) else None
