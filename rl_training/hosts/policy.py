"""The policy of a host that supplies functions to sample and decode: a plain loop, and verl, which only decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.policy import Policy, draws_of_rank
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import Rollout, join_rollouts
from rl_training.policy.scorer import Scorer

Sample = Callable[[int], Rollout]


class HostPolicy(Policy):
    """A policy that samples and decodes with the host's functions.

    Args:
        model: The trained model, unwrapped.
        scorer: The model's scorer.
        batch_size: Rows of one forward pass without graph.
        sample: `sample(n)` returns n fresh responses to random prompts, using no random numbers but torch's. None if
            the host cannot sample, and `Reasons.no_fresh_responses` says so.
        decode: Returns the text of a tensor of token ids. None uses the ids as text.
    """

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        batch_size: int,
        sample: Sample | None,
        decode: Callable[[Tensor], str] | None,
    ) -> None:
        super().__init__(model, scorer, batch_size)
        self._sample, self._decode = sample, decode
        self.has_text = decode is not None

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        sample = self._sample
        assert sample is not None, "the step's reasons rule out fresh responses"
        device = next(self.model.parameters()).device
        ranks = all_ranks()
        local_draws = draws_of_rank(num_sequences, ranks)

        def sample_batch(rows: Tensor) -> Rollout:
            # One seed per batch, because a batch uses as many random numbers as its longest response needs.
            seed_torch(seed, ranks.number, int(rows[0]) // self._batch_size, device=device)
            rollout = sample(len(rows))
            if rollout.num_sequences != len(rows):
                raise UserError(f"sample({len(rows)}) returned {rollout.num_sequences} responses: return exactly n")
            return rollout

        with torch.no_grad(), preserve_rng(device), self.measuring():
            parts = self.run_passes(torch.arange(len(local_draws)).split(self._batch_size), sample_batch)
        prompt_index = torch.tensor(local_draws, device=device)
        return dataclasses.replace(join_rollouts(parts), prompt_index=prompt_index, on_policy=True)

    def decode(self, ids: Tensor) -> str:
        return " ".join(map(str, ids.tolist())) if self._decode is None else self._decode(ids)
