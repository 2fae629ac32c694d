"""The policy of a plain loop, which supplies its own functions to sample and decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rl_training.engine.batch import Rollout, in_one_width, join_rollouts
from rl_training.engine.policy import Policy
from rl_training.engine.scorer import Scorer
from rl_training.hosts.processes import all_ranks, rank, seed_torch, streams_put_back

NO_SAMPLE = "fresh responses are needed, and the loop does not say how to sample them: measured_loop(..., sample=...)"


class LoopPolicy(Policy):
    """See the module's docstring.

    sample  sample(n) returns n fresh responses to random prompts, drawn with torch's random numbers alone; None: none
    """

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        batch_size: int,
        sample: Callable[[int], Rollout] | None,
        decode: Callable[[Tensor], str],
    ) -> None:
        super().__init__(model, scorer, batch_size)
        self._sample, self._decode = sample, decode

    def entropies(self, rollout: Rollout) -> Tensor:
        """Returns the entropies of all rows, (B, T), without graph, as training would score them."""
        rows = torch.arange(rollout.num_sequences, device=rollout.completion_ids.device)
        scores = self.scorer.score(rollout, rows, graph=False)
        return in_one_width([scores.entropies], at_least=rollout.completion_ids.shape[1])

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        if self._sample is None:
            raise ValueError(NO_SAMPLE)
        device = next(self.model.parameters()).device
        mine = torch.arange(rank(), num_sequences, all_ranks().count)
        parts = []
        with torch.no_grad(), streams_put_back(device), self.measuring():
            for number, rows in enumerate(mine.split(self._batch_size)):
                # One seed per batch: how many random numbers a batch uses depends on its longest response.
                seed_torch(seed, rank(), number, device=device)
                parts.append(self._sample(len(rows)))
        return dataclasses.replace(join_rollouts(parts), prompt_index=mine.to(device), on_policy=True)

    def decode(self, ids: Tensor) -> str:
        return self._decode(ids)
