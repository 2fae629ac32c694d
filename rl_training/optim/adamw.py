"""The AdamW step as PyTorch takes it, in parts that add up, and the gradient clipping before it.

    m ← β1 m + (1−β1) g          v ← β2 v + (1−β2) g²          t ← t + 1
    P = 1 / (√(v / (1−β2^t)) + ε)                               the preconditioner of THIS step
    δθ = −lr · P · m / (1−β1^t)  −  lr · λ · θ

split by cause into momentum (from the old m), gradient (from this g) and decay (λ). The preconditioner must be this
step's: the one before is 1/ε where v was still 0, which would dominate everything. Adam has its decay coupled: λθ is
added to g before all else, and δθ has no last term.

Source: Loshchilov & Hutter 2019, "Decoupled weight decay regularization", algorithm 2; torch.optim.AdamW.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rl_training.statistics.noise_scale import WARM_STEPS

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True)
class AdamWState:
    """AdamW's (or Adam's) view of one parameter BEFORE a step: its moments and the hyperparameters of its group."""

    exp_avg: Tensor  # m, shaped like the parameter
    exp_avg_sq: Tensor  # v, shaped like the parameter
    step: int  # t, steps already taken
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float | Tensor  # λ, one for all entries; of AdamW it may be a tensor, by entry
    decoupled: bool = True  # True for AdamW, False for Adam
    moves: bool = True  # False where the parameter got no gradient at all: torch takes no step, not even of decay

    def not_updated(self) -> AdamWState:
        """Return the state of a parameter that this step does not touch."""
        return dataclasses.replace(self, lr=0.0, moves=False)

    def delta(self, param: Tensor, grad: Tensor) -> UpdateParts:
        """Return the change that the optimizer would make with this gradient, by cause. Nothing is modified.

        Args:
            param: before the step.
            grad: after clipping, (..., *param.shape). Each entry of the leading dimensions is a separate step from the
                same state, as leave-fold-out needs.
        """
        decay = self.weight_decay
        factor = self.gradient_factor(param, grad)
        return UpdateParts(
            momentum=factor * (self._inertia * self.exp_avg),
            gradient=factor * grad,
            decay=(-self.lr * decay) * param if self.decoupled else (decay * factor) * param,
        )

    def total(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the sum of the parts of `delta`, in fewer passes over memory: this is a hot path."""
        scale, root = self._scale_and_root(param, grad)
        moment = torch.add(self._seen(param, grad), self.exp_avg, alpha=self._inertia)
        if not self.decoupled:
            return moment.div_(root).mul_(scale)
        return torch.addcdiv((-self.lr * self.weight_decay) * param, moment, root, value=scale)

    def gradient_factor(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the elementwise factor a for which `delta(param, grad).gradient` is a · grad."""
        scale, root = self._scale_and_root(param, grad)
        return torch.tensor(scale, dtype=root.dtype) / root  # a number over a tensor would take two passes

    def _scale_and_root(self, param: Tensor, grad: Tensor) -> tuple[float, Tensor]:
        """Return −lr (1−β1) / (1−β1^t) and √v̂ + ε of this step."""
        beta1, beta2 = self.betas
        seen = self._seen(param, grad)
        correction = 1.0 - beta2 ** (self.step + 1)
        old = (beta2 / correction) * self.exp_avg_sq
        root = torch.addcmul(old, seen, seen, value=(1.0 - beta2) / correction).sqrt_().add_(self.eps)
        return -self.lr * (1.0 - beta1) / (1.0 - beta1 ** (self.step + 1)), root

    @property
    def _inertia(self) -> float:
        """The weight of the old m relative to the gradient's, β1 / (1−β1)."""
        return self.betas[0] / (1.0 - self.betas[0])

    def _seen(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient that updates the moments. Adam adds its decay to it."""
        return grad if self.decoupled or not self.weight_decay else grad + self.weight_decay * param

    @property
    def is_warm(self) -> bool:
        """Whether v̂ has averaged enough gradients for its root to be a scale; True where the parameter stays put."""
        return self.step >= WARM_STEPS or not self.moves

    def preconditioner(self) -> Tensor:
        """Return P = 1/(√v̂ + ε) of the step BEFORE, (n,).

        Entries with v = 0 are 0: their P would be 1/ε and dominate everything else.
        """
        correction = math.sqrt(1.0 - self.betas[1] ** max(self.step, 1))  # √v̂ = √v / correction
        second = self.exp_avg_sq.reshape(-1)
        root = torch.threshold_(second.to(torch.promote_types(second.dtype, torch.float32)).sqrt(), 0.0, math.inf)
        return root.div_(correction).add_(self.eps).reciprocal_()


class UpdateParts(NamedTuple):
    """The parts of a parameter's change by cause, which add up to the change."""

    momentum: Tensor  # from the moment before the step
    gradient: Tensor  # from this step's gradient
    decay: Tensor  # from weight decay

    @property
    def total(self) -> Tensor:
        return (self.momentum + self.gradient).add_(self.decay)


def adamw_delta(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
) -> UpdateParts:
    """Return the change δθ that torch.optim.AdamW would make, by cause; with decoupled=False, torch.optim.Adam's.

    `exp_avg`, `exp_avg_sq` and `step` are those BEFORE the step. In the first step Adam moves by the gradient's sign:

    >>> param, grad, zeros = torch.zeros(2), torch.tensor([3.0, -0.2]), torch.zeros(2)
    >>> adamw_delta(param, grad, zeros, zeros, 0, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0).total
    tensor([-0.1000,  0.1000])
    """
    return AdamWState(exp_avg, exp_avg_sq, step, lr, betas, eps, weight_decay, decoupled).delta(param, grad)


def clip_coefficient(grad_norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor min(1, max_norm / (norm + 1e-6)) by which torch.nn.utils.clip_grad_norm_ scales a gradient."""
    return torch.clamp(max_norm / (grad_norm + CLIP_EPSILON), max=1.0)
