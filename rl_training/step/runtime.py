"""Compute with a step's data: further passes through the policy, and their gradients summed by fold.

Further forward passes and backwards over a step's sequences give, for any weights c and d on their scores,

    Σ_ik share_i (c_ik ∂log π(t_ik) + d_ik ∂h_ik)            summed by fold, over all ranks

without touching `.grad` or the loop's own reduction. All ranks run the same number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.gradients.fold_reduction import FoldReduction
from rl_training.gradients.folds import FoldGroup
from rl_training.gradients.loss_weights import LossWeights, rows_with_weight
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.vectors import Layout, Vector, copy, rows_of
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch


@dataclass(frozen=True)
class Runtime:
    """The live objects that compute with a step's data (StepData), on all ranks together."""

    policy: Policy  # scores sequences with the current parameters
    ranks: Ranks  # sums over ranks
    reduction: FoldReduction  # sums the gradients of a backward by fold

    @property
    def layout(self) -> Layout:
        """The arrangement of this rank's entries in vectors."""
        return self.reduction.shard.layout


def passes_in_lockstep(batch: Batch, ranks: Ranks, is_chosen: Tensor) -> Iterator[tuple[FoldGroup, Sequence[Tensor]]]:
    """Yield each fold group with its chosen rows, split into equally many passes on every rank. Collective.

    A pass may be empty. A row belongs to the group that has its fold, whichever microbatch it is in. Ranks communicate
    only once, at the start.

    Args:
        batch: The step's sequences and folds.
        is_chosen: (B,) bool.
    """
    chunk_size = max(len(rows) for rows in batch.microbatch_rows)
    rows = is_chosen.nonzero().squeeze(1)
    group_of_row = batch.fold[rows] // len(batch.folds[0].folds)  # all groups have the same number of folds
    sizes = group_of_row.bincount(minlength=len(batch.folds)).tolist()
    rows_of_groups = rows[group_of_row.argsort(stable=True)].split(sizes)
    local_passes = [torch.split(group_rows, chunk_size) if len(group_rows) else () for group_rows in rows_of_groups]
    counts = torch.tensor([len(passes) for passes in local_passes], dtype=torch.float64, device=is_chosen.device)
    for group, passes, num_passes in zip(batch.folds, local_passes, ranks.max(counts).tolist(), strict=True):
        yield group, [*passes, *[rows[:0]] * (int(num_passes) - len(passes))]


def sum_gradients(
    rollout: Rollout,
    runtime: Runtime,
    num_folds: int,
    rows_per_pass: Iterable[Tensor],
    weights: Sequence[LossWeights],
    shares: Tensor,
    on_scores: Callable[[Tensor, Scores], None] | None = None,
) -> list[Vector]:
    """Return the gradients of some rows, (folds, n) per bucket for each weighting. Collective.

    Args:
        rollout: The rollout that the rows index.
        runtime: Runs the passes.
        num_folds: Number of folds of these rows, over all ranks.
        rows_per_pass: This rank's rows in each pass.
        weights: c and d of all sequences, one for each vector returned.
        shares: (B, 1), a factor on each sequence.
        on_scores: Called with the rows and their scores.
    """
    sums = [runtime.layout.zeros(num_folds) for _ in weights]
    for rows in rows_per_pass:
        add_gradients(rollout, runtime, sums, rows, weights, shares, on_scores)
    return sums


def rows_by_fold(
    batch: Batch,
    runtime: Runtime,
    weights: Sequence[LossWeights],
    shares: Tensor,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> list[Vector]:
    """Return the gradient of each fold, (F, n) per bucket for each weighting. Collective.

    Passes cover only sequences that have a weight.

    Args:
        batch: The step's sequences and folds.
        runtime: Runs the passes.
        weights: One for each vector returned.
        shares: (B, 1), a factor on each sequence.
        device: Where rows are kept. None for the parameters' device.
        dtype: Dtype of the rows. None for the one in which gradients are summed.
    """
    has_weight = rows_with_weight(weights)
    vectors = [runtime.layout.zeros(batch.num_folds, device=device, dtype=dtype) for _ in weights]
    for group, passes in passes_in_lockstep(batch, runtime.ranks, has_weight):
        targets = [rows_of(vector, group.folds) for vector in vectors]
        if device is None and dtype is None:
            for rows in passes:
                add_gradients(batch.rollout, runtime, targets, rows, weights, shares)
            continue
        sums = sum_gradients(batch.rollout, runtime, len(group.folds), passes, weights, shares)
        for target, total in zip(targets, sums, strict=True):
            copy(target, total)
    return vectors


def gradients_by_group(
    batch: Batch,
    runtime: Runtime,
    weights: Sequence[LossWeights],
    shares: Tensor,
    is_chosen: Tensor,
    on_scores: Callable[[Tensor, Scores], None] | None = None,
) -> Iterator[tuple[FoldGroup, list[Vector]]]:
    """Yield each fold group with the gradients of its chosen rows: (folds, n) per bucket and weighting. Collective.

    Args:
        batch: The step's sequences and folds.
        runtime: Runs the passes.
        weights: One for each vector yielded.
        shares: (B, 1), a factor on each sequence.
        is_chosen: (B,) bool.
        on_scores: Called with the rows and their scores.
    """
    for group, passes in passes_in_lockstep(batch, runtime.ranks, is_chosen):
        yield group, sum_gradients(batch.rollout, runtime, len(group.folds), passes, weights, shares, on_scores)


def shares_of_folds(batch: Batch, num_ranks: int) -> Tensor:
    """Return the factors, (B, 1), that turn the loss weights into those of the mean gradient of each sequence's fold.

    The loss weights are those of a mean over a rank's sequences, and the loss is the mean over ranks.
    """
    share_of_fold = batch.num_sequences / num_ranks / batch.fold_sizes
    return share_of_fold.to(batch.fold.device)[batch.fold].unsqueeze(1)


def add_gradients(
    rollout: Rollout,
    runtime: Runtime,
    targets: Sequence[Vector],
    rows: Tensor,
    weights: Sequence[LossWeights],
    shares: Tensor,
    on_scores: Callable[[Tensor, Scores], None] | None = None,
) -> None:
    """Add Σ_ik share_i (c_ik ∂log π(t_ik) + d_ik ∂h_ik) of some rows to each target. Collective.

    Args:
        rollout: The rollout that the rows index.
        runtime: Runs the passes.
        targets: (folds, n) per bucket each.
        rows: On this rank. If empty, the rank runs the same passes as the others, with weight 0.
        weights: c and d of all sequences, one for each target.
        shares: (B, 1), a factor on each sequence.
        on_scores: Called with the rows and their scores, unless `rows` is empty.
    """
    fresh = None
    last = len(weights) - 1
    is_empty = not len(rows)
    if is_empty:
        rows = rows.new_zeros(1)
        shares = torch.zeros_like(shares)
    for index, (target, weight) in enumerate(zip(targets, weights, strict=True)):
        keep_graph = index < last and runtime.reduction.shard.supports_retain_graph
        if fresh is None:
            fresh = runtime.policy.score(rollout, rows)
        if on_scores is not None and index == 0 and not is_empty:
            on_scores(rows, fresh)
        share = shares[rows].to(fresh.logps.dtype)
        row_weights = weight.of_rows(rows, fresh.logps.shape[1], share)
        runtime.reduction.add(target, fresh, row_weights, keep_graph)
        fresh = fresh if keep_graph else None


def gradients_by_rank(
    rollout: Rollout, runtime: Runtime, rows_per_pass: Sequence[Tensor], weights: Sequence[LossWeights], shares: Tensor
) -> Iterator[list[Vector]]:
    """Yield the gradients of one pass after another, with one row for each rank: (ranks, n) per bucket. Collective.

    Args:
        rollout: The rollout that the rows index.
        runtime: Runs the passes.
        rows_per_pass: This rank's rows in each pass. A rank with fewer passes than others gets rows of zeros.
        weights: One for each vector yielded.
        shares: (B, 1), a factor on each sequence.
    """
    no_rows = torch.empty(0, dtype=torch.long, device=shares.device)
    for rows in runtime.ranks.pad_to_equal_count(list(rows_per_pass), no_rows):
        yield sum_gradients(rollout, runtime, runtime.ranks.count, [rows], weights, shares)
