"""Compute with a step's data: further passes through the policy, and their gradients summed by fold.

Further forward passes and backwards over a step's sequences give, for any weights c and d on their scores,

    Σ_ik share_i (c_ik ∂log π(t_ik) + d_ik ∂h_ik)            summed by fold, over all ranks

without touching `.grad` or the loop's own reduction. All ranks run the same number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.parallel.ranks import Ranks
from rl_training.parallel.rows import Receiver, Rows, adding_to
from rl_training.parallel.vectors import Layout, Vector
from rl_training.policy.policy import Policy, split_rows
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import FoldGroup
from rl_training.step.loss_weights import LossWeights, rows_with_weight

OnScores = Callable[[Tensor, Scores], None]  # called with this rank's rows of a pass and their scores


@dataclass(frozen=True)
class Passes:
    """Further passes through the policy with a step's data, on all ranks together. Every method is collective."""

    policy: Policy  # scores sequences with the current parameters
    ranks: Ranks  # sums over ranks
    reduction: FoldReduction  # sums the gradients of a backward by fold

    @property
    def layout(self) -> Layout:
        """The arrangement of this rank's entries in vectors."""
        return self.reduction.shard.layout

    def shares_of_folds(self, batch: Batch) -> Tensor:
        """Return the factors, (B, 1), that turn loss weights into those of the mean gradient of a sequence's fold.

        The loss weights are those of a mean over a rank's sequences, and the loss is the mean over ranks.
        """
        share_of_fold = batch.num_sequences / self.ranks.count / batch.fold_sizes
        return share_of_fold.to(batch.fold.device)[batch.fold].unsqueeze(1)

    def sum_by_fold(
        self,
        batch: Batch,
        weights: Sequence[LossWeights],
        shares: Tensor,
        dtype: torch.dtype | None = None,
    ) -> list[Rows]:
        """Return the gradient of each fold for each weighting.

        Passes cover only sequences that have a weight.

        Args:
            batch: The step's sequences and folds.
            weights: One for each of the returned rows.
            shares: (B, 1), a factor on each sequence.
            dtype: Dtype of the rows. None for the one in which gradients are summed.
        """
        rows = [Rows(self.layout, batch.num_folds, dtype) for _ in weights]
        has_weight = rows_with_weight(weights)
        self.hand_on(batch, weights, shares, has_weight, lambda index, folds: rows[index].receiver(folds))
        for part in rows:
            part.complete()
        return rows

    def hand_on(
        self,
        batch: Batch,
        weights: Sequence[LossWeights],
        shares: Tensor,
        is_chosen: Tensor,
        receiver_of: Callable[[int, range], Receiver],
        on_scores: OnScores | None = None,
        varentropy: bool = False,
    ) -> None:
        """Hand the gradients of each fold group's chosen rows to receivers, bucket by bucket as they arrive.

        If a group takes several passes, all but the last are summed first.

        Args:
            batch: The step's sequences and folds.
            weights: c and d of all sequences, one for each of several gradients.
            shares: (B, 1), a factor on each sequence.
            is_chosen: (B,) bool.
            receiver_of: Returns what takes the gradients of a weighting's index and these folds.
            on_scores: Called with the rows of each pass and their scores.
            varentropy: Whether these have varentropies.
        """
        score = (on_scores, varentropy)
        for group, rows_per_pass, num_passes in self._by_group(batch, is_chosen):
            receivers = [receiver_of(index, group.folds) for index in range(len(weights))]
            num_first = num_passes - 1
            if num_first > 0:
                first = rows_per_pass[:num_first]
                sums = self.sum(batch.rollout, len(group.folds), first, num_first, weights, shares, *score)
                receivers = [_with_sum(*pair) for pair in zip(receivers, sums, strict=True)]
            if num_passes:
                self._run(receivers, batch.rollout, rows_per_pass[num_first:], 1, weights, shares, *score)

    def sum_by_rank(
        self,
        rollout: Rollout,
        rows_per_pass: Sequence[Tensor],
        weights: Sequence[LossWeights],
        shares: Tensor,
        use: Callable[[list[Vector]], None],
    ) -> None:
        """Call `use` with the gradients of each pass, one row for each rank: (ranks, n) per bucket and weighting.

        Every rank calls it equally often. The row of a rank that has run out of passes is 0.

        Args:
            rollout: The rollout that the rows index.
            rows_per_pass: This rank's rows in each pass.
            weights: One for each vector.
            shares: (B, 1), a factor on each sequence.
            use: Called once per pass. The vectors are freed afterwards.
        """

        def run(rows: Tensor) -> None:
            use(self.sum(rollout, self.ranks.count, [rows], 1, weights, shares))

        self.ranks.in_lockstep(rows_per_pass, run, _no_rows(shares))

    def sum(
        self,
        rollout: Rollout,
        num_folds: int,
        rows_per_pass: Sequence[Tensor],
        num_passes: int,
        weights: Sequence[LossWeights],
        shares: Tensor,
        on_scores: OnScores | None = None,
        varentropy: bool = False,
    ) -> list[Vector]:
        """Return the gradients of some rows, (folds, n) per bucket for each weighting.

        Args:
            rollout: The rollout that the rows index.
            num_folds: Number of folds of these rows, over all ranks.
            rows_per_pass: This rank's rows in each pass.
            num_passes: The number of passes of the rank with the most.
            weights: c and d of all sequences, one for each vector returned.
            shares: (B, 1), a factor on each sequence.
            on_scores: Called with the rows of each pass and their scores.
            varentropy: Whether these have varentropies.
        """
        sums = [self.layout.zeros(num_folds) for _ in weights]
        receivers = [adding_to(total) for total in sums]
        self._run(receivers, rollout, rows_per_pass, num_passes, weights, shares, on_scores, varentropy)
        return sums

    def _by_group(self, batch: Batch, is_chosen: Tensor) -> Iterator[tuple[FoldGroup, Sequence[Tensor], int]]:
        """Yield each fold group with this rank's passes over its chosen rows, and the largest number of any rank.

        A row belongs to the group that has its fold, whichever microbatch it is in. Ranks communicate only once, at
        the start.

        Args:
            batch: The step's sequences and folds.
            is_chosen: (B,) bool.
        """
        chunk_size = max(len(rows) for rows in batch.microbatch_rows)
        rows = is_chosen.nonzero().squeeze(1)
        group_of_row = batch.fold[rows] // len(batch.folds[0].folds)  # all groups have the same number of folds
        sizes = group_of_row.bincount(minlength=len(batch.folds)).tolist()
        rows_of_groups = rows[group_of_row.argsort(stable=True)].split(sizes)
        passes_of_groups = [split_rows(group_rows, chunk_size) for group_rows in rows_of_groups]
        counts = torch.tensor([*map(len, passes_of_groups)], dtype=torch.float64, device=is_chosen.device)
        most = self.ranks.max(counts).tolist()
        for group, rows_per_pass, num_passes in zip(batch.folds, passes_of_groups, most, strict=True):
            yield group, rows_per_pass, int(num_passes)

    def _run(
        self,
        receivers: Sequence[Receiver],
        rollout: Rollout,
        rows_per_pass: Sequence[Tensor],
        num_passes: int,
        weights: Sequence[LossWeights],
        shares: Tensor,
        on_scores: OnScores | None = None,
        varentropy: bool = False,
    ) -> None:
        """Hand Σ_ik share_i (c_ik ∂log π(t_ik) + d_ik ∂h_ik) of some rows to each receiver, pass by pass."""

        def run(rows: Tensor) -> None:
            self._run_pass(receivers, rollout, rows, weights, shares, on_scores, varentropy)

        self.ranks.in_lockstep(rows_per_pass, run, _no_rows(shares), num_passes)

    def _run_pass(
        self,
        receivers: Sequence[Receiver],
        rollout: Rollout,
        rows: Tensor,
        weights: Sequence[LossWeights],
        shares: Tensor,
        on_scores: OnScores | None,
        varentropy: bool,
    ) -> None:
        """Hand the gradients of one pass to each receiver.

        Args:
            rows: On this rank. If empty, the rank runs the same pass as the others, with weight 0.
            on_scores: Called with the rows and their scores, unless `rows` is empty.
            varentropy: Whether these have varentropies.
        """
        fresh = None
        last = len(weights) - 1
        is_empty = not len(rows)
        if is_empty:
            rows = rows.new_zeros(1)
            shares = torch.zeros_like(shares)
        for index, (receiver, weight) in enumerate(zip(receivers, weights, strict=True)):
            keep_graph = index < last and self.reduction.shard.supports_retain_graph
            if fresh is None:
                fresh = self.policy.score(rollout, rows, varentropy=varentropy and index == 0)
            if on_scores is not None and index == 0 and not is_empty:
                on_scores(rows, fresh)
            share = shares[rows].to(fresh.logps.dtype)
            row_weights = weight.of_rows(rows, fresh.logps.shape[1], share)
            self.reduction.backward(receiver, fresh, row_weights, keep_graph)
            fresh = fresh if keep_graph else None


def _with_sum(receiver: Receiver, total: Vector) -> Receiver:
    """Return a receiver that hands on what it takes together with what is in `total`, (folds, n) per bucket."""

    def take(bucket: int, first: int, values: Tensor) -> None:
        summed = total[bucket][:, first : first + values.shape[1]]
        receiver.take(bucket, first, summed + values)
        summed.zero_()  # the rest of a bucket that arrives in two parts comes without it

    return Receiver(receiver.num_folds, take)


def _no_rows(shares: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.long, device=shares.device)
