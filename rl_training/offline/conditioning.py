"""The same X̄ and the same U under other preconditioners: what of the change of entropy is the optimizer's doing.

With g the clipped gradient of U, m ← β1 m + (1−β1) g, v̂ and P = 1/(√v̂ + ε) of this step, the directions are

    adam                the real step, weight decay included
    momentum-free adam  −P g                     what this batch alone asks for
    rms-only            −m / rms(√v̂)             one scale for each tensor of weights, none within
    identity            −m                       no preconditioner
    sgd                 −g                       neither preconditioner nor momentum

each scaled to the ‖δθ‖ of the real step, or to its first-order gain in reward, −g·δθ. Where that is negative, as it
can be with momentum, a scale to the same gain has no meaning and the number is nan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.mathematics.adamw import AdamWState
from rl_training.offline.first_order import SEQUENCE, TOKEN
from rl_training.offline.standing import Standing
from rl_training.offline.update import Update

NAMES = ("adam", "momentum-free adam", "rms-only", "identity", "sgd")


@dataclass(frozen=True)
class Conditioned:
    """δH₁ under one preconditioner, in nats; nan where the step has no such form."""

    name: str
    delta_h1: float  # per token, at the real step's norm
    delta_h1_sequence: float
    delta_h1_same_gain: float  # per token, at the real step's first-order gain in reward
    cosine: float  # of the direction with the real step


def condition(standing: Standing, update: Update, direction: Tensor) -> list[Conditioned]:
    """Returns δH₁ under each preconditioner. Empty where the optimizer is not Adam: it has none.

    direction  (2, P), X̄ per token and per sequence
    """
    if not all(isinstance(piece.state, AdamWState) for piece in update.pieces):
        return []
    real, gradient = update.delta.double(), (update.clip * update.gradient).double()
    gain = float(-gradient @ real)
    return [
        _compare(name, step.double(), real, gradient, gain, direction.double())
        for name, step in zip(NAMES, _directions(standing, update), strict=True)
    ]


def _compare(name: str, step: Tensor, real: Tensor, gradient: Tensor, gain: float, direction: Tensor) -> Conditioned:
    to_norm = float(real.norm() / step.norm())
    own_gain = float(-gradient @ step)
    to_gain = gain / own_gain if own_gain > 0 and gain > 0 else math.nan
    products = direction @ step
    return Conditioned(
        name=name,
        delta_h1=to_norm * float(products[TOKEN]),
        delta_h1_sequence=to_norm * float(products[SEQUENCE]),
        delta_h1_same_gain=to_gain * float(products[TOKEN]),
        cosine=float(real @ step) / float(real.norm() * step.norm()),
    )


def _directions(standing: Standing, update: Update) -> tuple[Tensor, ...]:
    """Returns the five directions, (P,) each, in the order of NAMES, with no scale that means anything."""
    gradient = update.clip * update.gradient
    momentum_free, momentum, root = (torch.empty_like(gradient) for _ in range(3))
    for piece in update.pieces:
        state, own = piece.state, gradient[piece.columns]
        assert isinstance(state, AdamWState)
        beta1, beta2 = state.betas
        second = beta2 * state.exp_avg_sq + (1.0 - beta2) * own.square()
        root[piece.columns] = (second / (1.0 - beta2 ** (state.step + 1))).sqrt()
        momentum[piece.columns] = beta1 * state.exp_avg + (1.0 - beta1) * own
        momentum_free[piece.columns] = own / (root[piece.columns] + state.eps)
    sizes = [param.numel() for param in standing.parameters.values()]
    of_tensors = zip(momentum.split(sizes), root.split(sizes), strict=True)
    rms_only = torch.cat([m / rms.square().mean().sqrt() for m, rms in of_tensors])
    return update.delta, -momentum_free, -rms_only, -momentum, -gradient
