"""What a step will do to token entropy, foretold from that step: one predictor a file, a function `predict`.

    predict(step: StepFacts) -> Estimate      nats per token; an error where the method has one

SOURCE, beside it, says where the formula stands. A predictor sees the step and nothing of the truth. A new file here
is in the next table: nothing is registered, and no run is made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rl_training.mathematics.estimate import Estimate


@dataclass(frozen=True)
class StepFacts:
    """What a predictor may see of an optimizer step. B responses of at most T tokens."""

    learning_rate: float
    advantages: Tensor  # (B,)
    mask: Tensor  # (B, T), bool: sampled tokens
    logps: Tensor  # (B, T), log p of the sampled token
    entropies: Tensor  # (B, T), H = −Σ p log p of the next-token distribution
    squares: Tensor  # (B, T), Σ p²
    log_squares: Tensor  # (B, T), Σ p² log p
    # By the engine, each X·δθ: forward (leave-fold-out), backward (of the step before), reuse (the same batch), sgd
    # (the same batch, and −lr times the gradient for δθ), deltaH1 (a fresh buffer, at some steps); and the entropy.
    products: Mapping[str, Estimate]

    def mean(self, values: Tensor) -> float:
        """Returns the mean of (B, T) values over all sampled tokens."""
        return float(values.double()[self.mask].mean())
