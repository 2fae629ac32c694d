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

from rl_training.parallel.fold_vectors import FoldVectors, Receiver, adding_to
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.vectors import Layout, Vector
from rl_training.policy.policy import Policy, split_rows
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import FoldGroup
from rl_training.step.loss_weights import LossWeights, rows_with_weight


@dataclass(frozen=True)
class Weightings:
    """What passes differentiate: one weighted sum of scores or several, Σ_ik share_i (c_ik log π(t_ik) + d_ik h_ik)."""

    weights: Sequence[LossWeights]  # c and d of all sequences, one for each gradient
    shares: Tensor  # (B, 1), a factor on each sequence
    on_scores: Callable[[Tensor, Scores], None] | None = None  # gets this rank's rows of each pass and their scores
    varentropy: bool = False  # whether these scores have varentropies

    @property
    def no_rows(self) -> Tensor:
        """The rows of a pass that a rank runs only because others do, (0,)."""
        return torch.empty(0, dtype=torch.long, device=self.shares.device)


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

    def gradients_by_fold(
        self, batch: Batch, weightings: Weightings, dtype: torch.dtype | None = None
    ) -> list[FoldVectors]:
        """Return the gradient of each fold for each weighting.

        Passes cover only sequences that have a weight.

        Args:
            batch: The step's sequences and folds.
            weightings: What is differentiated.
            dtype: Dtype of the vectors. None for the one in which gradients are summed.
        """
        gradients = [FoldVectors(self.layout, batch.num_folds, dtype) for _ in weightings.weights]
        self.send_gradients(batch, weightings, lambda index, folds: gradients[index].receiver(folds))
        for vectors in gradients:
            vectors.complete()
        return gradients

    def send_gradients(
        self,
        batch: Batch,
        weightings: Weightings,
        receiver_of: Callable[[int, range], Receiver],
        is_chosen: Tensor | None = None,
    ) -> None:
        """Hand the gradients of each fold group's chosen rows to receivers, bucket by bucket as they arrive.

        If a group takes several passes, all but the last are summed first.

        Args:
            batch: The step's sequences and folds.
            weightings: What is differentiated.
            receiver_of: Returns what takes the gradients of a weighting's index and these folds.
            is_chosen: (B,) bool. None: the rows that have a weight.
        """
        is_chosen = rows_with_weight(weightings.weights) if is_chosen is None else is_chosen
        for group, rows_per_pass, num_passes in self._by_fold_group(batch, is_chosen):
            receivers = [receiver_of(index, group.folds) for index in range(len(weightings.weights))]
            num_first = num_passes - 1
            if num_first > 0:
                sums = self.gradients(batch.rollout, rows_per_pass[:num_first], weightings, len(group.folds), num_first)
                receivers = [_with_sum(*pair) for pair in zip(receivers, sums, strict=True)]
            if num_passes:
                self._run(batch.rollout, rows_per_pass[num_first:], weightings, receivers, num_passes=1)

    def gradients_by_rank(
        self,
        rollout: Rollout,
        rows_per_pass: Sequence[Tensor],
        weightings: Weightings,
        use: Callable[[list[Vector]], None],
    ) -> None:
        """Call `use` with the gradients of each pass, a vector for each rank: (ranks, n) per bucket and weighting.

        Every rank calls it equally often. The vector of a rank that has run out of passes is 0.

        Args:
            rollout: The rollout that the rows index.
            rows_per_pass: This rank's rows in each pass.
            weightings: What is differentiated.
            use: Called once per pass. The vectors are freed afterwards.
        """

        def run(rows: Tensor) -> None:
            use(self.gradients(rollout, [rows], weightings, num_folds=self.ranks.count, num_passes=1))

        self.ranks.in_lockstep(rows_per_pass, run, weightings.no_rows)

    def gradients(
        self,
        rollout: Rollout,
        rows_per_pass: Sequence[Tensor],
        weightings: Weightings,
        num_folds: int = 1,
        num_passes: int | None = None,
    ) -> list[Vector]:
        """Return the gradients of some rows, (folds, n) per bucket for each weighting.

        Args:
            rollout: The rollout that the rows index.
            rows_per_pass: This rank's rows in each pass.
            weightings: What is differentiated.
            num_folds: Number of folds of these rows, over all ranks.
            num_passes: The number of passes of the rank with the most. None: the ranks exchange it.
        """
        sums = [self.layout.zeros(num_folds) for _ in weightings.weights]
        self._run(rollout, rows_per_pass, weightings, [adding_to(total) for total in sums], num_passes)
        return sums

    def _by_fold_group(self, batch: Batch, is_chosen: Tensor) -> Iterator[tuple[FoldGroup, Sequence[Tensor], int]]:
        """Yield each fold group with this rank's passes over its chosen rows, and the largest number of any rank.

        A row belongs to the group that has its fold, whichever microbatch it is in. Ranks communicate only once, at
        the start.

        Args:
            batch: The step's sequences and folds.
            is_chosen: (B,) bool.
        """
        chunk_size = max(len(rows) for rows in batch.microbatch_rows)
        rows = is_chosen.nonzero().squeeze(1)
        folds_per_group = len(batch.fold_groups[0].folds)  # the same for all fold groups
        group_of_row = batch.fold[rows] // folds_per_group
        sizes = group_of_row.bincount(minlength=len(batch.fold_groups)).tolist()
        rows_of_groups = rows[group_of_row.argsort(stable=True)].split(sizes)
        passes_of_groups = [split_rows(group_rows, chunk_size) for group_rows in rows_of_groups]
        counts = torch.tensor([*map(len, passes_of_groups)], dtype=torch.float64, device=is_chosen.device)
        most = self.ranks.max(counts).tolist()
        for group, rows_per_pass, num_passes in zip(batch.fold_groups, passes_of_groups, most, strict=True):
            yield group, rows_per_pass, int(num_passes)

    def _run(
        self,
        rollout: Rollout,
        rows_per_pass: Sequence[Tensor],
        weightings: Weightings,
        receivers: Sequence[Receiver],
        num_passes: int | None,
    ) -> None:
        """Hand the gradients of some rows to the receiver of each weighting, pass by pass."""
        self.ranks.in_lockstep(
            rows_per_pass,
            lambda rows: self._run_pass(rollout, rows, weightings, receivers),
            filler=weightings.no_rows,
            count=num_passes,
        )

    def _run_pass(self, rollout: Rollout, rows: Tensor, weightings: Weightings, receivers: Sequence[Receiver]) -> None:
        """Hand the gradients of one pass to the receiver of each weighting.

        If this rank has no rows, it runs the same pass as the others, with weight 0.
        """
        is_empty = not len(rows)
        shares = weightings.shares
        if is_empty:
            rows = rows.new_zeros(1)
            shares = torch.zeros_like(shares)
        fresh = None
        last = len(weightings.weights) - 1
        for index, (receiver, weight) in enumerate(zip(receivers, weightings.weights, strict=True)):
            keep_graph = index < last and self.reduction.shard.supports_retain_graph
            if fresh is None:
                fresh = self.policy.score(rollout, rows, varentropy=weightings.varentropy and index == 0)
            if index == 0 and weightings.on_scores is not None and not is_empty:
                weightings.on_scores(rows, fresh)
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
