"""Finds the scores that a loss is computed from. A subclass may run several forward passes for one loss."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.hosts.trl.compatibility import require
from rl_training.hosts.trl.members import FORWARD_PASS
from rl_training.hosts.trl.versions import NUM_SCORES, argument_of

# Log-probabilities, (B, T), and entropies, (B, T), or None for entropies that were not requested.
LossScores = tuple[Tensor, Tensor | None]
NO_SCORES_TO_CHANGE = (
    "{trainer}.compute_loss does not use the log-probabilities that " + FORWARD_PASS + " returns for its batch, whose "
    "weights an intervention changes: build on super().compute_loss, or train without interventions"
)
NO_SCORES_OF_SHARDS = (
    "{trainer}.compute_loss gets no log-probabilities and entropies of its batch from " + FORWARD_PASS + ", and FSDP2 "
    "and ZeRO-3 allow no further forward pass while the loss is computed: build on super().compute_loss, use ZeRO-2 "
    "(launch/zero2.yaml), or train without probes and records"
)


class ScoringCalls:
    """The calls of training's forward pass on exactly the responses of a microbatch, while its loss is computed.

    Calls on other prompts or responses (a teacher's view, a second loss), or for the prompts too, are ignored.

    Args:
        inputs: TRL's dictionary of the microbatch.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        self._shape = inputs["completion_ids"].shape
        self._scores: list[LossScores] = []

    def around_forward_pass(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """Keep the scores that the forward pass returns, if they are of this microbatch."""
        output = yield
        ids = argument_of("input_ids", FORWARD_PASS, args, kwargs)
        num_scored = argument_of("logits_to_keep", FORWARD_PASS, args, kwargs)
        if num_scored == self._shape[1] and ids.shape == self._ids.shape and torch.equal(ids, self._ids):
            has_entropies = argument_of("compute_entropy", FORWARD_PASS, args, kwargs)
            self._scores.append(_read_scores(output, self._shape, has_entropies))

    def scores_behind(self, loss: Tensor) -> LossScores | None:
        """Return the log-probabilities from which this loss is computed, with their entropies.

        Returns:
            None if the microbatch was not scored. Entropies are None if they were not requested. Log-probabilities
            without graph mean that the loss is computed from something else.

        Raises:
            UserError: If neither the log-probabilities nor the loss have a graph.
        """
        with_graph = [scores for scores in self._scores if scores[0].requires_grad]
        if self._scores and not with_graph:
            _require_graph(loss)
        if len(with_graph) > 1 and loss.requires_grad:
            logps = [scores[0] for scores in with_graph]
            weights = torch.autograd.grad(loss, logps, retain_graph=True, allow_unused=True)  # stops at logps
            used = [scores for scores, weight in zip(with_graph, weights, strict=True) if weight is not None]
            with_graph = used or with_graph
        return next(iter(with_graph or self._scores), None)


def _read_scores(output: Any, shape: torch.Size, with_entropies: bool) -> LossScores:
    """Return the log-probabilities and entropies in the output of training's forward pass.

    Args:
        output: What the forward pass returned.
        shape: The expected shape of both, (B, T).
        with_entropies: Whether entropies were requested. If not, None is returned for them.

    Raises:
        UserError: If the output is something else.
    """
    scores = f"GRPOTrainer.{FORWARD_PASS}"
    is_complete = isinstance(output, tuple) and len(output) == NUM_SCORES
    require(is_complete, f"{scores} does not return {NUM_SCORES} values")
    logps = output[0]
    entropies = output[1] if with_entropies else None
    _require_shape(logps, shape, f"the log-probabilities of {scores}")
    if with_entropies:
        _require_shape(entropies, shape, f"the entropies of {scores}")
    return logps, entropies


def _require_shape(values: Any, shape: torch.Size, what: str) -> None:
    """Raise UserError unless values of the forward pass are a tensor of a shape."""
    require(isinstance(values, Tensor), f"{what} are no tensor")
    require(values.shape == shape, f"{what} are of shape {tuple(values.shape)}")


def _require_graph(loss: Tensor) -> None:
    """Raise UserError if neither the log-probabilities nor the loss have a graph."""
    merged = "(is an adapter still merged, or switched off, after generation?)"
    require(loss.requires_grad, f"the log-probabilities of GRPOTrainer.{FORWARD_PASS} have no graph {merged}")
