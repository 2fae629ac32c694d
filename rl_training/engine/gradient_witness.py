"""Notice that the optimizer got another gradient than the one that probes have measured.

A loop may scale or edit gradients between the probes and the optimizer: undo a scale of the loss, clip by parameter,
add noise. Norms of the measured gradient, as of `gns`, are then not those of the gradient that is learned from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.optim.updates import clip_factors
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import sample_entries
from rl_training.step.data import StepData

TOLERANCE = 0.01  # relative difference of the gradients that rounding may make, also of gradients in bf16
SCALED = "measured before the gradient was multiplied by {factor:.3g}, which no max_grad_norm explains"
EDITED = "measured before the gradient was changed by {distance:.2g} of its norm"


class GradientWitness:
    """Compares a step's gradient as measured with what the optimizer gets, on at most 2^18 entries of each rank.

    Args:
        data: The step, with its gradients' square norms.
        shard: Reads the gradients right before the optimizer's step.
    """

    def __init__(self, data: StepData, shard: Shard) -> None:
        assert data.gradients.sq_norms is not None
        self._shard = shard
        self._measured = sample_entries(shard.layout, data.gradients.mean.values())
        self._clip = float(clip_factors(data.gradients.sq_norms[-1, :, 0].sum().cpu(), data.optimizer.max_grad_norm))
        self._sums: Tensor | None = None  # products of both gradients, on this rank

    def about_to_step(self) -> None:
        """Read the gradients right before the optimizer's step."""
        read = self._shard.gradients()
        weights = self._shard.weights()
        # A parameter without a gradient counts zeros.
        parts = [torch.zeros_like(weights[name]) if part is None else part for name, part in read.items()]
        now = sample_entries(self._shard.layout, parts)
        before = self._measured
        self._sums = torch.stack([before @ before, before @ now, now @ now])

    def remark(self, ranks: Ranks) -> str:
        """Return a remark if the optimizer got another gradient, apart from clipping; "" if not. Collective."""
        sums = self._measured.new_full((3,), math.nan) if self._sums is None else self._sums
        before, product, now = ranks.reduce(sums).tolist()
        if not before or not math.isfinite(before + now):  # unknown, or nothing to compare
            return ""
        factor = product / before
        distance = math.sqrt(max(now - factor * product, 0.0) / before)
        if distance > TOLERANCE * self._clip:
            # Of the distance to the clipped gradient.
            square = now - 2.0 * self._clip * product + self._clip**2 * before
            return EDITED.format(distance=math.sqrt(max(square, 0.0) / before) / self._clip)
        return "" if abs(factor - self._clip) <= TOLERANCE * self._clip else SCALED.format(factor=factor)
