"""The entropy gradient of each fold of a step, by a small forward and backward over some responses of every prompt.

Where the step is off-policy, every mean over sequences is weighted by the importance ratio

    ρ_i = π_now(t_i) / π_sampling(t_i) = exp(Σ_k log π_now(t_ik) − log π_sampling(t_ik)),

and normalised by Σ ρ. On-policy, ρ = 1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.batch import Batch
from rl_training.engine.loss_weights import gradient_of
from rl_training.engine.policy import Policy
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.mathematics.folds import response_number
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Layout, Vector


@dataclass(frozen=True)
class EntropySettings:
    """How the entropy gradient X of a step is estimated.

    responses_per_prompt  of every prompt, the first ones; all for G or more. Baselines use all responses
    per_sequence          compute X per sequence too: a second backward
    error_decay           weight of a step relative to the next in the average of the variances of single steps
    """

    responses_per_prompt: int = 1
    per_sequence: bool = False
    error_decay: float = 0.5

    def __post_init__(self) -> None:
        if self.responses_per_prompt < 1:
            raise ValueError(f"responses_per_prompt={self.responses_per_prompt} must be at least 1")
        if type(self.per_sequence) is not bool:
            raise ValueError(f"per_sequence={self.per_sequence} must be true or false")
        if not 0.0 <= self.error_decay < 1.0:
            raise ValueError(f"error_decay={self.error_decay} must lie in [0, 1); 0.5 averages over three steps")


def importance_ratios(batch: Batch) -> Tensor | None:
    """Returns ρ, (B,) fp64: 1 on-policy; None when the log-probabilities at sampling were not kept."""
    rollout, scores = batch.rollout, batch.scores
    if rollout.on_policy:
        return torch.ones(rollout.num_sequences, dtype=torch.float64, device=scores.logps.device)
    if rollout.sampling_logps is None:
        return None
    difference = scores.logps.double() - rollout.sampling_logps.double()
    return difference.masked_fill(scores.mask == 0, 0.0).sum(dim=1).exp()


def fold_gradients(
    batch: Batch,
    policy: Policy,
    parameters: Sequence[Tensor],
    layout: Layout,
    ratios: Tensor,
    level: float,
    settings: EntropySettings,
) -> Iterator[list[Vector]]:
    """Yields X of each fold of this rank, in order, from some responses of each of its prompts; baselines use all.

    One or two directions, each a mean over the fold's responses: Σ ρ (∂H_seq − H_tok ∂E[T]), and Σ ρ ∂H_seq.

    level  H_tok of the whole step: E[T] ∂H_tok = ∂H_seq − H_tok ∂E[T] is one direction, for one backward

    One small forward pass per fold on the unwrapped model, and a backward for each direction; `.grad` and the reducer
    of DDP are not touched.
    """
    scores, fold = batch.scores, batch.fold
    weights_for = functools.partial(surrogate_weights, scores.entropies, scores.mask, batch.rollout.prompt_index)
    sequence_weights, entropy_weights = weights_for(target="sequence")
    length_weights, _ = weights_for(target="length")  # ∂E[T] has no ∂h term
    logp_weights = [sequence_weights - level * length_weights, sequence_weights][: 1 + settings.per_sequence]
    taken = min(settings.responses_per_prompt, batch.responses_per_prompt)
    chosen = response_number(batch.rollout.prompt_index) < taken
    shares = ratios * (batch.responses_per_prompt / taken) / torch.bincount(fold)[fold]
    for k in range(batch.num_folds):
        rows = (chosen & (fold == k)).nonzero().squeeze(1)
        fresh = policy.score(batch.rollout, rows)
        width = fresh.logps.shape[1]
        share = shares[rows].to(fresh.logps.dtype).unsqueeze(1)
        pairs = [(share * weights[rows, :width], share * entropy_weights[rows, :width]) for weights in logp_weights]
        yield entropy_gradient(fresh, pairs, parameters, layout)


def entropy_gradient(
    fresh: Scores,
    weights: Sequence[tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    layout: Layout,
) -> list[Vector]:
    """Returns Σ_ik w_ik ∂log π(t_ik) + u_ik ∂h_ik over some rows, for each pair of weights (w, u).

    fresh    scores of these rows, with graph
    weights  (rows, width) each, as wide as the scores, already divided by the number of sequences of the mean

    One backward for each pair. A parameter that these rows do not reach has 0.
    """
    last = len(weights) - 1
    return [
        layout.vector(gradient_of(fresh, *pair, parameters, keep_graph=number < last))
        for number, pair in enumerate(weights)
    ]
