"""The policy as probes see it, whichever loop trains it: scores, fresh samples, other parameters."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.buffers import preserve_buffers
from rl_training.policy.precision import without_dropout
from rl_training.policy.rollout import Rollout, pad_and_concat
from rl_training.policy.rotary import preserve_rotary_tables
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.policy.token_distributions import TokenDistributions

Result = TypeVar("Result")


class Policy(abc.ABC):
    """The policy with its parameters at the moment of a call. Calls do not affect training.

    Passes are local to a rank unless weights are sharded: then every pass is collective. Each host has a subclass,
    which adds how the loop samples and decodes.

    Args:
        model: The model that is trained, unwrapped.
        scorer: The model's scorer.
        batch_size: Number of rows in a forward pass without graph.
    """

    def __init__(self, model: nn.Module, scorer: Scorer, batch_size: int) -> None:
        self.model = model
        self.scorer = scorer
        self._batch_size = batch_size
        self.has_text = True  # whether `decode` returns text rather than token ids; the same on all ranks
        self.lockstep_ranks: Ranks | None = None  # the ranks that must run equally many passes; None: passes are local
        self._shard: Shard | None = None  # until `begin`

    def begin(self, shard: Shard, ranks: Ranks) -> None:
        """Take what is known once training has begun: how this launch shards the weights, over which ranks."""
        self._shard = shard
        self.scorer.layer_rounding = shard.layer_rounding
        self.lockstep_ranks = ranks if shard.gathers_weights else None

    @property
    def shard(self) -> Shard:
        """How this launch shards the weights. Known from `begin` on."""
        assert self._shard is not None, "training has not begun"
        return self._shard

    def score(self, rollout: Rollout, rows: Tensor, *, varentropy: bool = False) -> Scores:
        """Score some rows WITH graph. The scores are as wide as the longest of these rows.

        It uses training's precision and dropout; inside `measuring`, IEEE fp32 without dropout.
        """
        return self.scorer.score(rollout, rows, varentropy=varentropy)

    def score_rollout(
        self,
        rollout: Rollout,
        scorer: Scorer | None = None,
        as_training: bool = False,
        dropout: bool = False,
        batches: Sequence[Tensor] | None = None,
        varentropy: bool = False,
    ) -> Scores:
        """Score rows, (B, T), without graph, as a measurement: in IEEE fp32 without dropout.

        Args:
            rollout: The sequences.
            scorer: Another model's scorer; None: the policy's own.
            as_training: Use training's precision instead.
            dropout: With `as_training`, use training's dropout too.
            batches: The rows of each forward pass, possibly none. None: all rows, in their order.
            varentropy: Return varentropies too.
        """
        scorer = scorer or self.scorer
        context: AbstractContextManager[None] = scorer.measuring()
        if as_training:
            context = contextlib.nullcontext() if dropout else without_dropout(self.model)
        mask = rollout.completion_mask
        width = rollout.completion_ids.shape[1]
        if batches is None:
            batches = self.batches_of(torch.arange(rollout.num_sequences, device=mask.device))
        with preserve_buffers(self.model), preserve_rotary_tables(self.model), context, torch.no_grad():
            parts = self.run_passes(
                batches, lambda rows: scorer.score(rollout, rows, graph=False, varentropy=varentropy)
            )
        if not parts:
            nothing = torch.zeros(0, width, device=mask.device)
            return Scores(nothing, nothing, mask[:0], nothing if varentropy else None)
        varentropies = [part.varentropies for part in parts if part.varentropies is not None]
        return Scores(
            logps=pad_and_concat([part.logps for part in parts], at_least=width),
            entropies=pad_and_concat([part.entropies for part in parts], at_least=width),
            mask=mask[torch.cat(list(batches))],
            varentropies=pad_and_concat(varentropies, at_least=width) if varentropies else None,
        )

    def token_distributions(self, rollout: Rollout, like: TokenDistributions | None = None) -> TokenDistributions:
        """Return the next-token distributions at a rollout's sampled tokens, as a measurement.

        Args:
            rollout: The sequences.
            like: Another policy's distributions at these tokens: the same tokens of the vocabulary are chosen. None
                chooses the most probable ones.
        """
        counts = rollout.completion_mask.sum(dim=1)
        first_tokens = (counts.cumsum(dim=0) - counts).tolist()
        chosen = None if like is None else like.tokens

        def run(rows: Tensor) -> list[TokenDistributions]:
            start = first_tokens[int(rows[0])]

            def convert(z: Tensor) -> TokenDistributions:
                nonlocal start
                start, first = start + len(z), start
                return TokenDistributions.of_logits(z, None if chosen is None else chosen[first:start])

            return self.scorer.map_logits(rollout, rows, convert)

        rows = torch.arange(rollout.num_sequences, device=counts.device)
        with preserve_buffers(self.model), preserve_rotary_tables(self.model), self.scorer.measuring():
            passes = self.run_passes(self.batches_of(rows), run)
        return TokenDistributions.join([part for parts in passes for part in parts])

    def batches_of(self, rows: Tensor) -> list[Tensor]:
        """Split rows into the batches of forward passes without graph."""
        return split_rows(rows, self._batch_size)

    def run_passes(self, batches: Sequence[Tensor], run: Callable[[Tensor], Result]) -> list[Result]:
        """Call `run` with the rows of each pass, and return the results. Collective if weights are sharded.

        Every loop over forward passes without graph is this one: with sharded weights, a rank with fewer batches than
        another runs row 0 once more for each, and drops the result.
        """
        if self.lockstep_ranks is None:
            return [run(rows) for rows in batches]
        device = next(self.model.parameters()).device
        return self.lockstep_ranks.in_lockstep(batches, run, torch.zeros(1, dtype=torch.long, device=device))

    @property
    def reference(self) -> Scorer | None:
        """The scorer of the loop's reference model; None if the loop keeps none."""
        return None

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model for a KL term: the loop's, or the policy's without its adapters."""
        return self.reference is not None or hasattr(self.model, "disable_adapter")

    def reference_logps(self, rollout: Rollout) -> Tensor | None:
        """Return the reference model's log-probabilities, (B, T), as a measurement; None if there is no such model."""
        if not self.has_reference:
            return None
        reference = self.reference
        if reference is not None:
            return self.score_rollout(rollout, reference).logps
        with cast(Any, self.model).disable_adapter():
            return self.score_rollout(rollout).logps

    def measuring(self) -> AbstractContextManager[None]:
        """Return a context without autocast, TF32 and dropout. Run both `score` and its backward inside it."""
        return self.scorer.measuring()

    @contextlib.contextmanager
    def with_weights(self, entries: Mapping[str, Tensor]) -> Iterator[None]:
        """Load other trained weights inside the context, then restore the current ones bitwise. Collective.

        Args:
            entries: This rank's entries, in the form that `shard.copy_local_weights()` returns.
        """
        originals = self.shard.copy_local_weights()
        try:
            self._load(entries)
            yield
        finally:
            self._load(originals)

    def _load(self, entries: Mapping[str, Tensor]) -> None:
        self.shard.load_local_weights(entries)
        torch.clear_autocast_cache()  # the loop's autocast may have cached half-precision copies of weights

    @abc.abstractmethod
    def sample(self, num_sequences: int, seed: int) -> Rollout:
        """Sample `num_sequences` fresh responses over all ranks, each to a random prompt of the training set.

        The same seed gives the same prompts and the same random numbers for any parameters.

        Returns:
            This rank's share.
        """

    @abc.abstractmethod
    def decode(self, ids: Tensor) -> str:
        """Return the text of one sequence of tokens, without special tokens."""


def split_rows(rows: Tensor, size: int) -> list[Tensor]:
    """Split rows into batches of at most `size`; none for no rows, for which torch.split returns an empty one."""
    return list(rows.split(size)) if len(rows) else []


def draws_of_rank(num_sequences: int, ranks: Ranks) -> range:
    """Return which of the fresh sequences this rank samples: `ranks.number`, `ranks.number + ranks.count`, and so on.

    Raises:
        UserError: On all ranks, if there are fewer sequences than ranks.
    """
    if num_sequences < ranks.count:
        raise UserError(
            f"{num_sequences} sequences cannot be shared among {ranks.count} processes: sample at least one for each"
        )
    return range(ranks.number, num_sequences, ranks.count)
