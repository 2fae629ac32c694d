"""The entropy gradient of each fold of a step, from a small forward and backward over some responses of every prompt.

Where the responses come from another sampler μ, such as an engine with other numerics or older weights, each token is
weighted by the ratio of its prefix, ρ_ik = exp Σ_{j<k} log π(t_ij) − log μ(t_ij), normalised at each position over all
sequences (entropy/weights.py). On-policy, ρ = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rl_training.entropy.weights import PrefixRatios, policy_first, surrogate_weights
from rl_training.gradients.folds import FoldGroup
from rl_training.gradients.loss_weights import LossWeights
from rl_training.parallel.vectors import Vector
from rl_training.policy.rollout import Rollout, pad_and_concat, response_index
from rl_training.step.data import EntropySettings, Step
from rl_training.step.score_check import ScoreCheck


def prefix_ratios(step: Step) -> PrefixRatios | None:
    """Return the prefix ratios to the sampler, normalised over all sequences; None where all are 1. A collective.

    Tables are as wide as the widest process's.
    """
    logs = step.batch.log_ratios()
    mask = step.batch.scores.mask
    if step.batch.rollout.sampling_logps is None or logs is None:
        return None
    width = int(step.ranks.max(torch.tensor([float(mask.shape[1])], dtype=torch.float64, device=mask.device)))
    logs, mask = (pad_and_concat([part], at_least=width) for part in (logs, mask))
    return PrefixRatios.of(logs, mask).normalised(step.ranks.reduce)


def levels_of_folds(step: Step, ratios: PrefixRatios | None) -> Tensor:
    """Return each fold's number of sequences, Σ ρh and Σ ρ over their tokens, (F, 3). A collective.

    A sequence's effect on the normaliser of position k, (1 − ρ_ik) times the mean there, is in its fold's row, so that
    the jackknife accounts for it. These effects add up to 0 over all sequences.
    """
    exact = step.batch.scores.exact()
    entropies = exact.entropies
    mask = exact.mask
    sums = [entropies.sum(dim=1), mask.sum(dim=1)]
    if ratios is not None:
        before = ratios.before
        order = policy_first(mask)
        terms = before * torch.stack(
            [pad_and_concat([part.gather(1, order)], at_least=before.shape[1]) for part in (entropies, mask)]
        )
        means = step.ranks.reduce(terms.sum(dim=1, keepdim=True)) / step.num_sequences
        sums = list((terms - (before - 1.0) * means).sum(dim=-1))
    return step.sum_by_fold(torch.stack([torch.ones_like(sums[0]), *sums], dim=1))


def fold_gradients(
    step: Step, ratios: PrefixRatios | None, level: float, settings: EntropySettings, check: ScoreCheck
) -> Iterator[tuple[FoldGroup, list[Vector]]]:
    """Yield each group of folds with its entropy gradients X. A collective.

    It takes a small forward pass, and a backward for each direction, over some responses of each prompt; baselines use
    all responses of a prompt. `.grad` and the loop's own reduction are not touched.

    Args:
        step: the step.
        ratios: prefix ratios to the sampler; None: all are 1.
        level: H_tok of the whole step; with it, E[T] ∂H_tok = ∂H_seq − H_tok ∂E[T] takes one backward.
        settings: how many responses of a prompt to use, and whether X per sequence is wanted.
        check: receives all scores that X is made of.

    Yields:
        A group and its directions, (folds, n) per bucket: ∂H_seq − H_tok ∂E[T] and, per sequence, ∂H_seq, each a mean
        over the fold's responses.
    """
    batch = step.batch
    gradients = step.gradients
    scores = batch.scores
    index = batch.rollout.prompt_index
    (sequence_weights, entropy_weights), (length_weights, _) = (  # the length has no ∂h term
        surrogate_weights(scores.entropies, scores.mask, index, target, ratios=ratios)
        for target in ("sequence", "length")
    )
    logp_weights = [sequence_weights - level * length_weights, sequence_weights][: 1 + settings.per_sequence]
    taken = min(settings.responses_per_prompt, batch.responses_per_prompt)
    chosen = response_index(index) < taken
    sizes = step.fold_sizes.to(batch.fold.device)
    shares = (batch.responses_per_prompt / taken / sizes[batch.fold]).unsqueeze(1)
    directions = [LossWeights(weights, entropy_weights) for weights in logp_weights]
    for group, passes in passes_in_lockstep(step, chosen):
        sums = [gradients.layout.zeros(len(group.folds)) for _ in directions]
        for rows in passes:
            add_gradients(step, sums, rows, directions, shares, check=check)
        yield group, sums


def passes_in_lockstep(step: Step, chosen: Tensor) -> Iterator[tuple[FoldGroup, Sequence[Tensor]]]:
    """Yield each group of folds with the chosen rows in its folds, in equally many parts on every process.

    Parts may be empty. Rows belong to the group that has their fold, wherever they lie. One collective, at the start.

    Args:
        step: the step.
        chosen: (B,) bool.
    """
    batch = step.batch
    chunk_size = max(len(rows) for rows in batch.microbatch_rows)
    rows = chosen.nonzero().squeeze(1)
    group_of_row = batch.fold[rows] // len(step.folds[0].folds)  # all groups have as many folds
    sizes = group_of_row.bincount(minlength=len(step.folds)).tolist()
    of_groups = rows[group_of_row.argsort(stable=True)].split(sizes)
    parts = [torch.split(group_rows, chunk_size) if len(group_rows) else () for group_rows in of_groups]
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64, device=chosen.device)
    for group, part, count in zip(step.folds, parts, step.ranks.max(counts).tolist(), strict=True):
        yield group, [*part, *[rows[:0]] * (int(count) - len(part))]


def add_gradients(
    step: Step,
    targets: Sequence[Vector],
    rows: Tensor,
    weights: Sequence[LossWeights],
    shares: Tensor,
    rollout: Rollout | None = None,
    check: ScoreCheck | None = None,
) -> None:
    """Add Σ_ik share_i (c_ik ∂log π(t_ik) + d_ik ∂h_ik) of some rows to each target. A collective.

    Args:
        step: the step.
        targets: (folds, n) per bucket each.
        rows: of this process. Without any it runs the same passes as other processes, with weight 0.
        weights: c and d of all sequences, one for each target.
        shares: (B, 1).
        rollout: the rows' rollout; None: the step's.
        check: receives the scores, where the rollout is the step's.
    """
    fresh = None
    last = len(weights) - 1
    num_rows = len(rows)
    if not len(rows):
        rows = torch.zeros(1, dtype=torch.long, device=rows.device)
        shares = torch.zeros_like(shares)
    for number, (target, weight) in enumerate(zip(targets, weights, strict=True)):
        keep_graph = number < last and step.gradients.reduction.shard.supports_retain_graph
        if fresh is None:
            fresh = step.policy.score(rollout or step.batch.rollout, rows)
        if check is not None and num_rows and number == 0:
            check.add(rows, fresh)
        share = shares[rows].to(fresh.logps.dtype)
        row_weights = weight.of_rows(rows, fresh.logps.shape[1], share)
        step.gradients.reduction.add(target, fresh, row_weights, keep_graph)
        fresh = fresh if keep_graph else None


def shares_of_folds(step: Step) -> Tensor:
    """Return the factors, (B, 1), that turn the loss's weights into those of the mean gradient of a sequence's fold.

    The loss's weights are those of a mean over a process's sequences, and the loss is the mean over processes.
    """
    share_of_fold = step.num_sequences / step.ranks.count / step.fold_sizes
    return share_of_fold.to(step.batch.fold.device)[step.batch.fold].unsqueeze(1)


def gradients_of_processes(
    step: Step,
    parts: Sequence[Tensor],
    weights: Sequence[LossWeights],
    shares: Tensor,
    rollout: Rollout | None = None,
) -> Iterator[list[Vector]]:
    """Yield the gradients of one part of each process's rows at a time, (processes, n) per bucket. A collective.

    Args:
        step: the step.
        parts: rows of this process. The rows of a process with fewer parts than others are then zero.
        weights: one for each vector that is yielded.
        shares: (B, 1), a factor on each sequence.
        rollout: the rows' rollout; None: the step's.
    """
    layout = step.gradients.layout
    none = torch.zeros(0, dtype=torch.long, device=shares.device)
    for rows in step.ranks.pad_to_equal_count(list(parts), none):
        sums = [layout.zeros(step.ranks.count) for _ in weights]
        add_gradients(step, sums, rows, weights, shares, rollout)
        yield sums
