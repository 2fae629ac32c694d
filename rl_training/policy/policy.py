"""The policy as probes see it, whichever loop trains it: scores, fresh samples, other parameters."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.precision import without_dropout
from rl_training.policy.rollout import Rollout, pad_and_concat
from rl_training.policy.rotary import preserve_rotary_tables
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores


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
        self.in_lockstep: Ranks | None = None  # set if all ranks must run the same number of passes
        self.shard: Shard | None = None  # set once training has begun

    def score(self, rollout: Rollout, rows: Tensor) -> Scores:
        """Score some rows WITH graph. The scores are as wide as the longest of these rows.

        It uses training's precision and dropout; inside `measuring`, IEEE fp32 without dropout.
        """
        return self.scorer.score(rollout, rows)

    def score_rollout(
        self, rollout: Rollout, scorer: Scorer | None = None, as_training: bool = False, dropout: bool = False
    ) -> Scores:
        """Score all rows, (B, T), without graph, as a measurement: in IEEE fp32 without dropout.

        Args:
            rollout: The sequences.
            scorer: Another model's scorer; None: the policy's own.
            as_training: Use training's precision instead.
            dropout: With `as_training`, use training's dropout too.
        """
        scorer = scorer or self.scorer
        context: AbstractContextManager[None] = scorer.measuring()
        if as_training:
            context = contextlib.nullcontext() if dropout else without_dropout(self.model)
        width = rollout.completion_ids.shape[1]
        rows = torch.arange(rollout.num_sequences, device=rollout.completion_ids.device)
        with preserve_rotary_tables(self.model), context, torch.no_grad():
            parts = [scorer.score(rollout, batch, graph=False) for batch in self.in_batches(rows, self._batch_size)]
        parts = parts[: -(-len(rows) // self._batch_size)]
        return Scores(
            logps=pad_and_concat([part.logps for part in parts], at_least=width),
            entropies=pad_and_concat([part.entropies for part in parts], at_least=width),
            mask=rollout.completion_mask,
        )

    def in_batches(self, rows: Tensor, size: int) -> list[Tensor]:
        """Split rows into batches of `size`; in lockstep, repeat the first until every rank has the same number."""
        parts = list(rows.split(size))
        return parts if self.in_lockstep is None else self.in_lockstep.pad_to_equal_count(parts, parts[0])

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

    def shifted(self, shift: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context in which parameters point to copies shifted by `shift`."""
        return self.pointing_to({name: self.model.get_parameter(name).data + delta for name, delta in shift.items()})

    @contextlib.contextmanager
    def pointing_to(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Point parameters to other tensors inside the context. Their own tensors are never written to."""
        parameters = {name: self.model.get_parameter(name) for name in weights}
        originals = {name: param.data for name, param in parameters.items()}
        try:
            for name, param in parameters.items():
                param.data = weights[name]
            yield
        finally:
            for name, param in parameters.items():
                param.data = originals[name]

    @contextlib.contextmanager
    def with_weights(self, entries: Mapping[str, Tensor]) -> Iterator[None]:
        """Load other trained weights inside the context, then restore the current ones bitwise. Collective.

        Args:
            entries: This rank's entries, in the form that `shard.copy_local_weights()` returns.
        """
        assert self.shard is not None
        originals = self.shard.copy_local_weights()
        try:
            self._load(entries)
            yield
        finally:
            self._load(originals)

    def _load(self, entries: Mapping[str, Tensor]) -> None:
        assert self.shard is not None
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
