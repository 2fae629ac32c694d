"""What a probe may ask of the policy, whatever loop it is trained by: scores, fresh samples, other parameters."""

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
    """The policy with its parameters at the moment of the call. Calls do not affect training.

    Everything is local to a rank, but where weights are sharded: then every pass is a collective. A host's subclass
    implements what goes beyond the model: how the loop samples and decodes.

    model       as it is trained, unwrapped
    batch_size  rows of one forward pass without graph
    """

    def __init__(self, model: nn.Module, scorer: Scorer, batch_size: int) -> None:
        self.model, self.scorer, self._batch_size = model, scorer, batch_size
        self.has_text = True  # `decode` returns a text, and not token ids for want of a tokenizer: as all processes do
        self.in_lockstep: Ranks | None = None  # where all processes run equally many passes
        self.shard: Shard | None = None  # where the weights lie, once training has begun

    def score(self, rollout: Rollout, rows: Tensor) -> Scores:
        """Return log-probabilities and entropies WITH graph of some rows, only as wide as the longest of these.

        In training's precision and with its dropout; inside of `measuring` in IEEE fp32 and without.
        """
        return self.scorer.score(rollout, rows)

    def score_rollout(
        self, rollout: Rollout, scorer: Scorer | None = None, as_training: bool = False, dropout: bool = False
    ) -> Scores:
        """Return log-probabilities and entropies of all rows, (B, T), without graph, as a measurement.

        scorer       of another model than the policy's
        as_training  in training's precision
        dropout      and with its dropout
        """
        scorer = scorer or self.scorer
        context: AbstractContextManager[None] = scorer.measuring()
        if as_training:
            context = contextlib.nullcontext() if dropout else without_dropout(self.model)
        width = rollout.completion_ids.shape[1]
        rows = torch.arange(rollout.num_sequences, device=rollout.completion_ids.device)
        with preserve_rotary_tables(self.model), context, torch.no_grad():
            parts = [scorer.score(rollout, some, graph=False) for some in self.in_batches(rows, self._batch_size)]
        parts = parts[: -(-len(rows) // self._batch_size)]
        return Scores(
            logps=pad_and_concat([part.logps for part in parts], at_least=width),
            entropies=pad_and_concat([part.entropies for part in parts], at_least=width),
            mask=rollout.completion_mask,
        )

    def in_batches(self, rows: Tensor, size: int) -> list[Tensor]:
        """Return rows in parts of so many; in lockstep copies of the first follow where others have more."""
        parts = list(rows.split(size))
        return parts if self.in_lockstep is None else self.in_lockstep.pad_to_equal_count(parts, parts[0])

    @property
    def reference(self) -> Scorer | None:
        """The scorer of a reference model of the loop's own; None where it keeps none."""
        return None

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model for a KL term: the loop's, or the policy's without its adapters."""
        return self.reference is not None or hasattr(self.model, "disable_adapter")

    def reference_logps(self, rollout: Rollout) -> Tensor | None:
        """Return the log-probabilities of that model, (B, T), as a measurement; None where there is none."""
        if not self.has_reference:
            return None
        reference = self.reference
        if reference is not None:
            return self.score_rollout(rollout, reference).logps
        with cast(Any, self.model).disable_adapter():
            return self.score_rollout(rollout).logps

    def measuring(self) -> AbstractContextManager[None]:
        """Return a context in which `score` leaves out autocast, TF32 and dropout; the backward belongs in it too."""
        return self.scorer.measuring()

    def shifted(self, shift: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context in which parameters point to moved copies."""
        return self.pointing_to({name: self.model.get_parameter(name).data + moved for name, moved in shift.items()})

    @contextlib.contextmanager
    def pointing_to(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which parameters point to other tensors; what they pointed to is never written to."""
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
        """A context in which the trained weights are others; then they are bitwise what they were. A collective.

        entries  this process's, as `shard.copy_local_weights()` has them
        """
        assert self.shard is not None
        held = self.shard.copy_local_weights()
        try:
            self._put(entries)
            yield
        finally:
            self._put(held)

    def _put(self, entries: Mapping[str, Tensor]) -> None:
        assert self.shard is not None
        self.shard.load_local_weights(entries)
        torch.clear_autocast_cache()  # of weights in half precision, where the loop's autocast is still on

    @abc.abstractmethod
    def sample(self, num_sequences: int, seed: int) -> Rollout:
        """Return this rank's share of so many fresh responses, one each to random prompts of the training set.

        The same seed gives the same prompts and the same random numbers, whatever the parameters.
        """

    @abc.abstractmethod
    def decode(self, ids: Tensor) -> str:
        """Return the text of one sequence of tokens, special tokens left out."""
