"""Lion's step, split into the same parts as AdamW's.

    c = β1 m + (1−β1) g          δθ = −lr · (sign(c) + λ θ)          m ← β2 m + (1−β2) g

By cause: `momentum` is −lr sign(m), the step that the old m would make without g. `gradient` is how this g changes it,
−lr (sign(c) − sign(m)). `decay` comes from λ. (β1 m / |c| and (1−β1) g / |c| would add up too, but they are huge and
cancel if c is nearly 0.)

bitsandbytes' Lion with 32-bit moments takes this step: optim=lion_32bit in a trainer.

Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.optim.formula import OptimizerState, StepFormula, UpdateParts
from rl_training.statistics.unavailable import Unavailable

NOT_32_BITS = Unavailable(
    "no_8_bit_formula", "Lion with 8-bit or paged moments has no formula here", "optim=lion_32bit"
)


@dataclass(frozen=True)
class LionState(OptimizerState):
    """Lion's state of one parameter BEFORE a step: its momentum and the hyperparameters of its group."""

    # Rounding of the clipped gradient may flip the sign of an entry whose c is nearly 0, which moves the step by
    # 2 / √entries of its norm: 0.004 for 2^18 compared entries. Below 10,000 entries one flipped sign is too much.
    max_error: ClassVar[float] = 0.02

    exp_avg: Tensor  # m, shaped like the parameter
    step: int  # steps already taken
    lr: float
    betas: tuple[float, float]
    weight_decay: float | Tensor  # λ, one for all entries, or a tensor with one per entry
    is_updated: bool = True

    def delta(self, param: Tensor, grad: Tensor) -> UpdateParts:
        """Return the change δθ that Lion would make, by cause. Nothing is modified.

        Only the second entry's gradient is large enough to reverse the step that the momentum would make:

        >>> state = LionState(torch.tensor([1.0, 1.0]), step=5, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
        >>> state.delta(torch.zeros(2), torch.tensor([-5.0, -20.0])).total
        tensor([-0.1000,  0.1000])
        """
        momentum_sign = torch.sign(self.exp_avg)
        return UpdateParts(
            momentum=(-self.lr * momentum_sign).expand_as(grad),
            gradient=-self.lr * (self._direction(grad) - momentum_sign),
            decay=((-self.lr * self.weight_decay) * param).expand_as(grad),
        )

    def total(self, param: Tensor, grad: Tensor) -> Tensor:
        return self._direction(grad).add_(self.weight_decay * param).mul_(-self.lr)

    def gradient_factor(self, param: Tensor, grad: Tensor) -> Tensor:
        return torch.where(grad == 0.0, 0.0, self.delta(param, grad).gradient / grad)

    def _direction(self, grad: Tensor) -> Tensor:
        """Return sign(c)."""
        return (self.betas[0] * self.exp_avg + (1.0 - self.betas[0]) * grad).sign_()

    @property
    def is_fresh(self) -> bool:
        return self.step == 0

    @property
    def steady_state_factor(self) -> float:
        """(1 − β1 β2^t) / (1 − β1) after t steps: the weight of all gradients in c over the weight of this one."""
        return (1.0 - self.betas[0] * self.betas[1] ** self.step) / (1.0 - self.betas[0])

    @property
    def is_sign_based(self) -> bool:
        return self.is_updated

    @property
    def can_join_decays(self) -> bool:
        return True


def _read(weights: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> LionState:
    """Return Lion's state of one parameter. Before the first step bitsandbytes has none, and m is zero."""
    return LionState(
        exp_avg=state["state1"] if state else torch.zeros_like(weights),
        step=int(state["step"]) if state else 0,
        lr=float(group["lr"]),
        betas=group["betas"],
        weight_decay=group["weight_decay"],
    )


def _reason(optimizer: Any) -> Unavailable | None:
    return NOT_32_BITS if optimizer.args.optim_bits != 32 or optimizer.is_paged else None


LION = StepFormula("bitsandbytes.optim.lion.Lion", _read, _reason)
