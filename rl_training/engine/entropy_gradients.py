"""The entropy gradient of each fold of a step, by a small forward and backward over some responses of every prompt.

Where the step is off-policy, every mean over sequences is weighted by the importance ratio

    ρ_i = π_now(t_i) / π_sampling(t_i) = exp(Σ_k log π_now(t_ik) − log π_sampling(t_ik)),

and normalised by Σ ρ. On-policy, ρ = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rl_training.engine.batch import Batch, Rollout
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.step import EntropySettings, Step
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.mathematics.folds import FoldGroup, response_number
from rl_training.mathematics.vectors import Vector


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
    step: Step, ratios: Tensor, level: float, settings: EntropySettings
) -> Iterator[tuple[FoldGroup, list[Vector]]]:
    """Yields X of the folds of each group, (folds, n) of each bucket, from some responses of each of its prompts.

    One or two directions, each a mean over the fold's responses: Σ ρ (∂H_seq − H_tok ∂E[T]), and Σ ρ ∂H_seq; baselines
    use all responses of a prompt. A collective.

    level  H_tok of the whole step: E[T] ∂H_tok = ∂H_seq − H_tok ∂E[T] is one direction, for one backward

    A small forward pass and a backward for each direction; `.grad` and a loop's own reduction are not touched.
    """
    batch, gradients = step.batch, step.gradients
    scores, index = batch.scores, batch.rollout.prompt_index
    sequence_weights, entropy_weights = surrogate_weights(scores.entropies, scores.mask, index, target="sequence")
    length_weights, _ = surrogate_weights(scores.entropies, scores.mask, index, target="length")  # it has no ∂h term
    logp_weights = [sequence_weights - level * length_weights, sequence_weights][: 1 + settings.per_sequence]
    taken = min(settings.responses_per_prompt, batch.responses_per_prompt)
    chosen = response_number(index) < taken
    sizes = step.fold_sizes.to(ratios)
    shares = (ratios * (batch.responses_per_prompt / taken) / sizes[batch.fold]).unsqueeze(1)
    directions = [LossWeights(weights, entropy_weights) for weights in logp_weights]
    for group, passes in passes_in_lockstep(step, chosen):
        found = [gradients.layout.zeros(len(group.folds)) for _ in directions]
        for rows in passes:
            add_gradients(step, found, group.fold_of_rank, rows, directions, shares)
        yield group, found


def passes_in_lockstep(step: Step, chosen: Tensor) -> Iterator[tuple[FoldGroup, Sequence[Tensor]]]:
    """Yields the chosen rows of each group of folds, in as many parts on every process, of which some may be empty.

    A collective, once.

    chosen  (B,) bool
    """
    batch = step.batch
    at_once = max(len(rows) for rows in batch.microbatch_rows)
    numbers = torch.arange(len(chosen), device=chosen.device)
    parts = []
    for group in step.folds:
        rows = torch.cat([numbers[part.start : part.stop] for part in group.passes])
        rows = rows[chosen[rows]]
        parts.append(rows.split(at_once) if len(rows) else ())
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64, device=chosen.device)
    for group, part, count in zip(step.folds, parts, step.ranks.largest(counts).tolist(), strict=True):
        yield group, [*part, *[numbers[:0]] * (int(count) - len(part))]


def add_gradients(
    step: Step,
    targets: Sequence[Vector],
    fold_of_rank: Sequence[int],
    rows: Tensor,
    weights: Sequence[LossWeights],
    shares: Tensor,
    rollout: Rollout | None = None,
) -> None:
    """Adds Σ_ik share_i (c_ik ∂log π(t_ik) + d_ik ∂h_ik) of some rows to each target, for its weights. A collective.

    rows    of this process; where there are none it runs the passes as the others do, with weight 0
    shares  (B, 1)            rollout  whose rows they are, where it is not the step's
    """
    fresh, last = None, len(weights) - 1
    if not len(rows):
        rows, shares = torch.zeros(1, dtype=torch.long, device=rows.device), torch.zeros_like(shares)
    for number, (target, weight) in enumerate(zip(targets, weights, strict=True)):
        keep_graph = step.gradients.reduction.graph_lasts and number < last
        if fresh is None:
            fresh = step.policy.score(rollout or step.batch.rollout, rows)
        share = shares[rows].to(fresh.logps.dtype)
        own = weight.of_rows(rows, fresh.logps.shape[1], share)
        step.gradients.reduction.add(target, fold_of_rank, fresh, own, keep_graph)
        fresh = fresh if keep_graph else None
