"""What a probe may ask of the policy, whoever tells the probe of the steps: a running trainer, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from rl_training.mathematics.scores import Scores
from rl_training.step.rollout import Rollout


class Policy(Protocol):
    """The policy at its parameters at the moment of the call. Training never notices that it was asked.

    Everything is local to a rank: no collective.
    """

    def score(self, rollout: Rollout, rows: Tensor) -> Scores:
        """Returns log-probabilities and entropies WITH graph of some rows, only as wide as the longest of these.

        What runs is the unwrapped model as training runs it, autocast and dropout included, unless `as_measured`.
        """
        ...

    def score_rollout(self, rollout: Rollout) -> Scores:
        """Returns log-probabilities and entropies of all rows, (B, T), without graph, autocast and dropout."""
        ...

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        """Returns this rank's share of so many fresh responses, one each to random prompts of the training set.

        The same seed gives the same prompts and the same random numbers, whatever the parameters.
        """
        ...

    def shifted(self, shift: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Returns a context in which the named parameters are moved by so much; then they are back, bit for bit."""
        ...

    def as_measured(self) -> AbstractContextManager[None]:
        """Returns a context in which `score` leaves out autocast and dropout; the backward belongs into it too."""
        ...

    def decode(self, ids: Tensor) -> str:
        """Returns the text of one sequence of tokens, special tokens left out."""
        ...
