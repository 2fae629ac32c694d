"""The training loss as a function of the scores: its derivatives by each log-probability and each entropy.

    ∂loss = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik

This holds for any loss of log-probabilities and entropies, Dr-GRPO's or another, with or without an entropy bonus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.policy.scores import Scores


@dataclass(frozen=True)
class LossWeights:
    """The derivatives of a loss by the scores of this rank's sequences. Its gradient is the sum over both kinds."""

    logps: Tensor  # (B, T), c, by log-probabilities
    entropies: Tensor | None  # (B, T), d, by entropies; None if the loss does not depend on them

    def of_rows(self, rows: Tensor, width: int, share: float | Tensor = 1.0) -> LossWeights:
        """Return the weights of some rows, cut to the width of their scores.

        Args:
            rows: Indices of sequences.
            width: T of their scores.
            share: A factor on all rows, or one per row, (rows, 1).
        """
        entropies = None if self.entropies is None else self.entropies[rows, :width] * share
        return LossWeights(self.logps[rows, :width] * share, entropies)

    def where(self, condition: Tensor) -> LossWeights:
        """Return these weights, with 0 where `condition`, (B, T) or (B, 1) bool, is False."""
        entropies = None if self.entropies is None else self.entropies.where(condition, 0.0)
        return LossWeights(self.logps.where(condition, 0.0), entropies)

    def stacked(self) -> Tensor:
        """Return both kinds of weights as one tensor, (2, B, T)."""
        return torch.stack([self.logps, torch.zeros_like(self.logps) if self.entropies is None else self.entropies])

    @classmethod
    def of_stacked(cls, table: Tensor) -> LossWeights:
        """Undo `stacked`. Entropy weights that are all 0 become None, which saves their backward."""
        return cls(table[0], table[1] if table[1].any() else None)


def rows_with_weight(weights: Sequence[LossWeights]) -> Tensor:
    """Return which sequences have a nonzero weight, (B,) bool."""
    parts = [part for weight in weights for part in (weight.logps, weight.entropies) if part is not None]
    return torch.stack([(part != 0).any(dim=1) for part in parts]).any(dim=0)


def outputs_and_weights(fresh: Scores, weights: LossWeights) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs and output gradients of one backward that gives Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik."""
    if weights.entropies is None:
        return [fresh.logps], [weights.logps.to(fresh.logps)]
    return [fresh.logps, fresh.entropies], [weights.logps.to(fresh.logps), weights.entropies.to(fresh.entropies)]


def gradient_of(
    fresh: Scores, logps: Tensor, entropies: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik by parameter, in one backward.

    Args:
        fresh: Scores with graph.
        logps: c, shaped like the scores.
        entropies: d, shaped like the scores. None for 0.
        parameters: The parameters whose gradients are returned, zeros if the scores do not depend on them.
    """
    outputs, weights = outputs_and_weights(fresh, LossWeights(logps, entropies))
    return torch.autograd.grad(outputs, parameters, weights, allow_unused=True, materialize_grads=True)
