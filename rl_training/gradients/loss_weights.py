"""The training loss as a function of the scores: its derivatives by each log-probability and each entropy.

    ∂loss = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik

holds for any loss of log-probabilities and entropies, Dr-GRPO's and others, with or without an entropy bonus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.policy.scores import Scores


@dataclass(frozen=True)
class LossWeights:
    """∂loss/∂score of all sequences of a step on this rank: their gradient is the sum over both."""

    logps: Tensor  # (B, T), c
    entropies: Tensor | None  # (B, T), d; None where the loss does not depend on entropies

    def of_rows(self, rows: Tensor, width: int, share: float | Tensor = 1.0) -> LossWeights:
        """Return the weights of some rows, as wide as their scores.

        share  factor on all of them, or (rows, 1) on each
        """
        entropies = None if self.entropies is None else self.entropies[rows, :width] * share
        return LossWeights(self.logps[rows, :width] * share, entropies)

    def where(self, chosen: Tensor) -> LossWeights:
        """Return these weights, and 0 where (B, T) or (B, 1) are not chosen."""
        entropies = None if self.entropies is None else self.entropies.where(chosen, 0.0)
        return LossWeights(self.logps.where(chosen, 0.0), entropies)

    def stacked(self) -> Tensor:
        """Return both as one table, (2, B, T)."""
        return torch.stack([self.logps, torch.zeros_like(self.logps) if self.entropies is None else self.entropies])

    @classmethod
    def of_stacked(cls, table: Tensor) -> LossWeights:
        """Return the weights of such a table; those of entropies are None, which spares their backward, if all 0."""
        return cls(table[0], table[1] if table[1].any() else None)


def outputs_and_weights(fresh: Scores, weights: LossWeights) -> tuple[list[Tensor], list[Tensor]]:
    """Return what one backward starts from to give Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik: tensors, their gradients."""
    if weights.entropies is None:
        return [fresh.logps], [weights.logps.to(fresh.logps)]
    return [fresh.logps, fresh.entropies], [weights.logps.to(fresh.logps), weights.entropies.to(fresh.entropies)]


def gradient_of(
    fresh: Scores, logps: Tensor, entropies: Tensor | None, parameters: Sequence[Tensor], keep_graph: bool = False
) -> tuple[Tensor, ...]:
    """Return Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik of these weights, as wide as the scores, in one backward.

    keep_graph  for another backward through the same scores
    """
    outputs, weights = outputs_and_weights(fresh, LossWeights(logps, entropies))
    return torch.autograd.grad(
        outputs, parameters, weights, retain_graph=keep_graph, allow_unused=True, materialize_grads=True
    )
