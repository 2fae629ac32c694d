"""The training loss as a function of the scores: its derivatives by each log-probability and each entropy.

    ∂loss = Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik

holds for any loss of log-probabilities and entropies, Dr-GRPO's and others, with or without an entropy bonus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.mathematics.scores import Scores


@dataclass(frozen=True)
class LossWeights:
    """∂loss/∂score of all sequences of a step on this rank: their gradient is the sum over both."""

    logps: Tensor  # (B, T), c
    entropies: Tensor | None  # (B, T), d; None where the loss does not depend on entropies

    @property
    def num_sequences(self) -> int:
        return len(self.logps)

    def gradient(
        self,
        fresh: Scores,
        rows: Tensor,
        parameters: Sequence[Tensor],
        share: float | Tensor = 1.0,
        keep_graph: bool = False,
    ) -> tuple[Tensor, ...]:
        """Returns the gradient of some rows, on the scale of a mean: B times what they add to this rank's gradient.

        0 for a parameter that these rows do not reach.

        fresh  scores of these rows, with graph
        share  factor on all of it, or (rows, 1) on each
        """
        width = fresh.logps.shape[1]
        entropies = None if self.entropies is None else self.num_sequences * self.entropies[rows, :width] * share
        logps = self.num_sequences * self.logps[rows, :width] * share
        return gradient_of(fresh, logps, entropies, parameters, keep_graph)


def gradient_of(
    fresh: Scores, logps: Tensor, entropies: Tensor | None, parameters: Sequence[Tensor], keep_graph: bool = False
) -> tuple[Tensor, ...]:
    """Returns Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik of these weights, as wide as the scores, in one backward.

    keep_graph  for another backward through the same scores
    """
    outputs, weights = [fresh.logps], [logps]
    if entropies is not None:
        outputs, weights = [fresh.logps, fresh.entropies], [logps, entropies]
    return torch.autograd.grad(
        outputs, parameters, weights, retain_graph=keep_graph, allow_unused=True, materialize_grads=True
    )
