"""The training gradient of each fold of a step: this rank's entries, kept as rows or measured as square norms.

A loop's loss is a mean over the B sequences that a rank has in the step, and its gradient is the mean over N ranks. For
fold k, with n_k of all Σ n sequences, the gradients that reach the leaves therefore add up to

    N n_k / Σ n · g_k,        g_k the mean gradient of the fold.

This factor is undone once, at the end of the step. The optimizer's gradient is then the mean of the rows, weighted by
n_k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_training.engine.gradient_check import CaughtSums
from rl_training.optim.state import OptimizerView, view_optimizer
from rl_training.optim.updates import sqrt_preconditioner
from rl_training.parallel.rows import Receiver, Rows, rows_dtype
from rl_training.parallel.vectors import Vector, num_bytes, sample_entries, square_norms
from rl_training.step.batch import Batch
from rl_training.step.data import Gradients
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import FoldGroup
from rl_training.step.needs import Need
from rl_training.step.passes import Passes, WeightedScores


class FoldRecorder:
    """Catches the gradients of one step at a time. It holds nothing of parameter size between steps.

    Args:
        reduction: Sums the gradients of each backward by fold.
        offload: Keep rows in host memory.
        dtype: Dtype in which rows are kept. None: 8 bits if they are large, otherwise the layout's.
    """

    def __init__(self, reduction: FoldReduction, offload: bool = False, dtype: torch.dtype | None = None) -> None:
        self.reduction, self.layout = reduction, reduction.shard.layout
        self._device, self._dtype = "cpu" if offload else None, rows_dtype(reduction.shard.layout, dtype)
        self.rows: Rows | None = None
        # (K + 1, parameters, 2) fp64, this rank's entries: |g_k|² and Σ P g_k² per fold; the last row is the step's
        # gradient g.
        self.sq_norms: Tensor | None = None
        self.peak_bytes = 0  # most bytes of vectors held here at once during the step
        self._groups: Sequence[FoldGroup] = ()
        self._sqrt_metric: Vector | None = None  # √P of Adam's metric
        self._current_group: int | None = None  # index of the group whose gradients are arriving
        self._current_rows: Rows | None = None  # its rows, if rows are not kept or are rounded when they are complete
        self._caught: list[Tensor] = []  # (K, samples) per bucket: the sampled entries of all that has been caught

    def start_step_for(self, groups: Sequence[FoldGroup], needs: Need) -> None:
        """Start a step with what probes need from its folds."""
        shard, sqrt_metric = self.reduction.shard, None
        if Need.SQ_NORMS in needs:
            sqrt_metric = sqrt_preconditioner(self.layout, shard.weights(), view_optimizer(shard).states)
        self.start_step(groups, Need.FOLD_GRADIENTS in needs, sqrt_metric)

    def start_step(
        self, groups: Sequence[FoldGroup], keep_rows: bool = True, sqrt_metric: Vector | None = None
    ) -> None:
        """Allocate what the new step needs.

        Args:
            keep_rows: Keep every row.
            sqrt_metric: √P of Adam's metric, nan if the optimizer defines none. Square norms are measured if it is
                given. If rows are not kept, only one group's rows are in memory at a time.
        """
        self.release()
        self.reduction.num_late_gradients = self.peak_bytes = 0
        self._groups, self._sqrt_metric = groups, sqrt_metric
        num_folds = groups[-1].folds.stop
        if keep_rows or sqrt_metric is not None:
            self._caught = [
                torch.zeros(num_folds, len(columns), dtype=self.layout.dtype, device=self.layout.device)
                for columns in self.layout.sampled_columns
            ]
        if keep_rows:
            self.rows = Rows(self.layout, num_folds, self._dtype, self._device)
        if sqrt_metric is not None:
            self.sq_norms = torch.zeros(
                num_folds + 1, len(self.layout.names), 2, dtype=torch.float64, device=self.layout.device
            )

    def arm(self, first_row: int) -> None:
        """Set the hooks for the microbatch that starts at `first_row`.

        No hooks are set if the step keeps nothing of the gradients.
        """
        if self.rows is None and self.sq_norms is None:
            return
        index = next(
            i for i, group in enumerate(self._groups) if any(first_row in rows for rows in group.rows_per_pass)
        )
        if index != self._current_group:
            self._complete_current_rows()
        self._current_group = index
        group = self._groups[index]
        is_rounded = self._dtype.itemsize < self.layout.dtype.itemsize
        sums_passes = is_rounded and len(group.rows_per_pass) > 1  # rounding each pass's sum would add up
        if self._current_rows is None and (self.rows is None or sums_passes):
            self._current_rows = Rows(self.layout, len(group.folds))
        self.reduction.arm(self._receiver(group.folds))

    def _receiver(self, folds: range) -> Receiver:
        """Return what takes the gradients of these folds: their rows, and the sampled entries."""
        if self._current_rows is not None:
            rows = self._current_rows.receiver(range(len(folds)))
        else:
            assert self.rows is not None
            rows = self.rows.receiver(folds)

        def take(bucket: int, first: int, values: Tensor) -> None:
            rows.take(bucket, first, values)
            samples, columns = self.layout.sampled_within(bucket, first, values.shape[1])
            self._caught[bucket][folds.start : folds.stop, samples] += values[:, columns]

        return Receiver(len(folds), take)

    def complete(
        self, batch: Batch, gradients: Gradients, optimizer: OptimizerView, passes: Passes
    ) -> tuple[Gradients, CaughtSums]:
        """Add what was caught to the gradients of a step whose gradients are complete. Collective.

        Args:
            batch: The step's sequences and folds.
            gradients: The step's, without those by fold.
            optimizer: Says which parameters will not move.
            passes: Computes the fold gradients that hooks could not catch.

        Returns:
            The step's gradients with rows and square norms, as far as they are kept, and what tells whether they are
            the step's.
        """
        if batch.has_mixed_folds:
            self._recompute(batch, passes)
        sums = self.finish(batch.fold_sizes, passes.ranks.count, gradients.mean)
        sq_norms = None if self.sq_norms is None else passes.ranks.reduce(self.sq_norms)
        # a parameter that will not move counts 0 in any metric, with or without optimizer state
        if sq_norms is not None and optimizer.states is not None:
            sq_norms[:, [not state.is_updated for state in optimizer.states.values()], 1] = 0.0
        gradients = dataclasses.replace(gradients, rows=self.rows, sq_norms=sq_norms)
        num_late, sq_distance, sq_norm, *fold_sq_norms = passes.ranks.reduce(sums).tolist()
        return gradients, CaughtSums(num_late, sq_distance, sq_norm, fold_sq_norms)

    def _recompute(self, batch: Batch, passes: Passes) -> None:
        """Replace the microbatch gradients caught by hooks with recomputed gradients of whole-prompt folds. Collective.

        The loss's weights on log-probabilities and entropies determine what each response adds to its fold's gradient:

            g_k = 1/n_k Σ_{i in fold k} Σ_t c_it ∂log π(t_it) + d_it ∂h_it

        This costs as much as training's own passes over the responses that have a weight. Responses with advantage 0
        have none.
        """
        self.start_step(batch.folds, sqrt_metric=self._sqrt_metric)
        ones = torch.ones(len(batch.fold), 1, dtype=batch.loss_weights.logps.dtype, device=batch.fold.device)
        scores = WeightedScores([batch.loss_weights], shares=ones)
        passes.send_gradients(batch, scores, lambda _, folds: self._receiver(folds))

    def finish(self, sizes: Tensor, num_ranks: int, mean: Mapping[str, Tensor]) -> Tensor:
        """Complete rows and square norms, once all gradients have arrived.

        Args:
            sizes: (K,), n_k over all ranks.
            num_ranks: N.
            mean: The step's gradient by parameter, whose square norms come last.

        Returns:
            (3 + K,) fp64: this rank's share of `CaughtSums`.
        """
        layout = self.layout
        factors = float(sizes.sum()) / (num_ranks * sizes)
        self._complete_current_rows()
        if self.rows is not None:
            self.rows.complete()
            self.rows.factors = factors
            self._measure(self.rows, range(len(sizes)))
        self._count_bytes()
        if self.sq_norms is not None:
            self.sq_norms[:-1] *= factors.to(self.sq_norms.device).square().view(-1, 1, 1)
            whole = [part.unsqueeze(0) for part in layout.vector(mean.values())]
            self.sq_norms[-1:] = square_norms(layout, whole, self._sqrt_metric)
        caught = torch.cat(self._caught, dim=1).double()
        sampled_mean = sample_entries(layout, mean.values())
        samples = [sampled_mean - caught.sum(dim=0) / num_ranks, sampled_mean, *(factors.to(caught)[:, None] * caught)]
        squares = torch.stack([part.square().sum() for part in samples])
        num_late = squares.new_full((1,), float(self.reduction.num_late_gradients))
        return torch.cat([num_late, squares * (layout.num_entries / max(1, len(sampled_mean)))])

    def release(self) -> None:
        """Free the rows."""
        self.reduction.drop()
        self.rows = self.sq_norms = self._sqrt_metric = self._current_group = self._current_rows = None
        self._caught = []

    def _count_bytes(self) -> None:
        rows = (part.num_bytes for part in (self.rows, self._current_rows) if part is not None)
        self.peak_bytes = max(self.peak_bytes, sum(rows) + num_bytes(self._sqrt_metric))

    def _complete_current_rows(self) -> None:
        """Round the current group's rows if they are kept, or measure them."""
        if self._current_rows is not None and self._current_group is not None:
            folds = self._groups[self._current_group].folds
            self._current_rows.complete()
            self._count_bytes()
            if self.rows is not None:
                self.rows.replace(folds, self._current_rows.of_folds(range(len(folds))))
            else:
                self._measure(self._current_rows, folds)
        self._current_rows = None

    def _measure(self, rows: Rows, folds: range) -> None:
        """Measure the square norms of the rows of these folds."""
        for index, fold in enumerate(folds):
            if self.sq_norms is not None:
                row = rows.of_folds(range(index, index + 1))
                self.sq_norms[fold : fold + 1] = square_norms(self.layout, row, self._sqrt_metric)
