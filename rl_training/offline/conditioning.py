"""The same X̄ and U under other preconditioners: how much of the entropy change is due to the optimizer.

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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.vectors import CHUNK
from rl_training.offline.first_order import SEQUENCE, TOKEN
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.update import Update

NAMES = ("adam", "momentum-free adam", "rms-only", "identity", "sgd")


def condition(restored: RestoredTrainer, update: Update, direction: Tensor) -> list[dict[str, Any]]:
    """Returns δH₁ under each preconditioner, in nats. Empty where the optimizer is not Adam: it has none.

    direction  (2, P), X̄ per token and per sequence

        delta_h1, delta_h1_sequence  at the real step's norm
        delta_h1_same_gain           per token, at the real step's first-order gain in reward; nan where that has none
        cosine                       of the direction with the real step
    """
    if not all(isinstance(piece.state, AdamWState) for piece in update.pieces):
        return []
    gradient = update.clip * update.gradient
    gain = -_dot(gradient, update.delta)
    steps = _directions(restored, update, gradient)
    return [_compare(name, next(steps), update.delta, gradient, gain, direction) for name in NAMES]


def _compare(name: str, step: Tensor, real: Tensor, gradient: Tensor, gain: float, direction: Tensor) -> dict[str, Any]:
    norm, real_norm, own_gain = math.sqrt(_dot(step, step)), math.sqrt(_dot(real, real)), -_dot(gradient, step)
    to_norm = real_norm / norm
    to_gain = gain / own_gain if own_gain > 0 and gain > 0 else math.nan
    of_token = _dot(direction[TOKEN], step)
    return {
        "name": name,
        "delta_h1": to_norm * of_token,
        "delta_h1_sequence": to_norm * _dot(direction[SEQUENCE], step),
        "delta_h1_same_gain": to_gain * of_token,
        "cosine": _dot(real, step) / (real_norm * norm),
    }


def _directions(restored: RestoredTrainer, update: Update, gradient: Tensor) -> Iterator[Tensor]:
    """Yields the five directions, (P,) each, in the order of NAMES; their scale is arbitrary.

    One at a time: each is as large as all trainable parameters.
    """
    yield update.delta
    root = _of_pieces(update, gradient, _root)
    eps = _of_pieces(update, gradient, lambda state, own: torch.full_like(own, state.eps))
    yield gradient / -eps.add_(root)
    del eps
    momentum = _of_pieces(update, gradient, lambda state, own: torch.lerp(own, state.exp_avg, state.betas[0]))
    sizes = [param.numel() for param in restored.parameters.values()]
    of_tensors = zip(momentum.split(sizes), root.split(sizes), strict=True)
    yield torch.cat([-m / rms.square().mean().sqrt() for m, rms in of_tensors])
    del root
    yield momentum.neg_()
    yield -gradient


def _of_pieces(update: Update, gradient: Tensor, form: Callable[[AdamWState, Tensor], Tensor]) -> Tensor:
    """Returns a flat vector, (P,), from what each piece's state makes of its gradient."""
    return torch.cat([form(piece.state, gradient[piece.flat]) for piece in update.pieces])  # type: ignore[arg-type]


def _root(state: AdamWState, gradient: Tensor) -> Tensor:
    """Returns √v̂ of this step."""
    beta2 = state.betas[1]
    second = torch.lerp(gradient.square(), state.exp_avg_sq, beta2)
    return (second / (1.0 - beta2 ** (state.step + 1))).sqrt()


def _dot(a: Tensor, b: Tensor) -> float:
    """Returns the inner product in fp64, of which there is only a chunk at a time."""
    pairs = zip(a.split(CHUNK), b.split(CHUNK), strict=True)
    return float(sum((x.double() @ y.double() for x, y in pairs), start=a.new_zeros((), dtype=torch.float64)))
