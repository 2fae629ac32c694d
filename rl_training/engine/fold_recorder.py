"""The training gradient of each fold of a step: this rank's entries, kept as rows or measured as square norms.

A loop's loss is a mean over the B sequences that a rank has in the step, and its gradient is the mean over N ranks. For
fold k, with n_k of all Σ n sequences, the gradients that reach the leaves therefore add up to

    N n_k / Σ n · g_k,        g_k the mean gradient of the fold.

This factor is undone once, at the end of the step. The optimizer's gradient is then the mean of the rows, weighted by
n_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.gradients.fold_reduction import FoldReduction
from rl_training.gradients.folds import FoldGroup
from rl_training.optim.state import OptimizerView, view_optimizer
from rl_training.optim.updates import sqrt_preconditioner
from rl_training.parallel.vectors import Vector, add, copy, dot, dots, num_bytes, rows_of, square_norms
from rl_training.step.batch import Batch
from rl_training.step.needs import Need
from rl_training.step.passes import Passes


@dataclass(frozen=True)
class FoldGradients:
    """The gradients of a step's folds, and the sums needed to compare them with the step's own gradient."""

    rows: Vector | None  # (F, n) per bucket; None if rows are not kept
    sq_norms: Tensor | None  # as in `Gradients`
    sums: Tensor  # (3 + F,) fp64, as returned by `FoldRecorder.finish`, summed over all ranks

    @property
    def squares(self) -> Tensor:
        """(F,) fp64, |g_k|² over all ranks."""
        return self.sums[3:]


class FoldRecorder:
    """Catches the gradients of one step at a time. It holds nothing of parameter size between steps.

    Args:
        reduction: Sums the gradients of each backward by fold.
        offload: Keep rows in host memory.
        dtype: Dtype in which rows are kept. None for the layout's.
    """

    def __init__(self, reduction: FoldReduction, offload: bool = False, dtype: torch.dtype | None = None) -> None:
        self._reduction, self.layout = reduction, reduction.shard.layout
        self._device, self._dtype = "cpu" if offload else None, dtype
        self.rows: Vector | None = None  # (F, n) per bucket
        # (F + 1, parameters, 2) fp64, this rank's entries: |g_k|² and Σ P g_k² per fold; the last row is the step's
        # gradient g.
        self.sq_norms: Tensor | None = None
        self.peak_bytes = 0  # most bytes of vectors held here at once during the step
        self._groups: Sequence[FoldGroup] = ()
        self._sqrt_metric: Vector | None = None  # √P of Adam's metric
        self._current_group: int | None = None  # index of the group whose gradients are arriving
        self._current_rows: Vector | None = None  # its rows, if rows are not kept
        self._accumulated: Vector | None = None  # the sum of the rows of all groups so far, if rows are not kept

    def start_step_for(self, groups: Sequence[FoldGroup], needs: Need, num_microbatches: int) -> None:
        """Start a step with what probes need from its folds.

        Args:
            num_microbatches: If there are more groups, folds are slices, whose square norms require rows.
        """
        shard, sqrt_metric = self._reduction.shard, None
        if Need.SQ_NORMS in needs:
            sqrt_metric = sqrt_preconditioner(self.layout, shard.weights(), view_optimizer(shard).states)
        is_sliced = len(groups) > num_microbatches
        self.start_step(groups, Need.FOLD_GRADIENTS in needs or (is_sliced and sqrt_metric is not None), sqrt_metric)

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
        self._reduction.num_late_gradients = self.peak_bytes = 0
        self._groups, self._sqrt_metric = groups, sqrt_metric
        num_folds = groups[-1].folds.stop
        if keep_rows:
            self.rows = self.layout.zeros(num_folds, device=self._device, dtype=self._dtype)
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
            self._measure_current_rows()
        self._current_group = index
        group = self._groups[index]
        if self.rows is not None:
            target = rows_of(self.rows, group.folds)
        else:
            if self._current_rows is None:
                self._current_rows = self.layout.zeros(len(group.folds))
            target = self._current_rows
        self._reduction.arm(target)

    def finish_backward(self) -> None:
        """Add up what the hooks have caught, and remove them. Collective if hooks were set."""
        self._reduction.finish()

    def drop_backward(self) -> None:
        """Remove the hooks: the backward has failed, perhaps on this rank only."""
        self._reduction.drop()

    def complete(
        self, batch: Batch, passes: Passes, mean: Mapping[str, Tensor], optimizer: OptimizerView
    ) -> FoldGradients:
        """Return the fold gradients of a step whose gradients are complete. Collective.

        Args:
            batch: The step's sequences and folds.
            passes: Computes the fold gradients that hooks could not catch.
            mean: The step's gradient, before clipping.
            optimizer: The optimizer before the step.
        """
        if batch.has_mixed_folds:
            self._recompute(batch, passes)
        elif batch.has_slices:
            self.split_microbatch_gradients(batch, passes)
        squares = self.finish(batch.fold_sizes, passes.ranks.count, self.layout.vector(mean.values()))
        sq_norms = None if self.sq_norms is None else passes.ranks.reduce(self.sq_norms)
        # a parameter that will not move counts 0 in any metric, with or without optimizer state
        if sq_norms is not None and optimizer.states is not None:
            sq_norms[:, [not state.is_updated for state in optimizer.states.values()], 1] = 0.0
        return FoldGradients(self.rows, sq_norms, passes.ranks.reduce(squares))

    def _recompute(self, batch: Batch, passes: Passes) -> None:
        """Replace the microbatch gradients caught by hooks with recomputed gradients of whole-prompt folds. Collective.

        The loss's weights on log-probabilities and entropies determine what each response adds to its fold's gradient:

            g_k = 1/n_k Σ_{i in fold k} Σ_t c_it ∂log π(t_it) + d_it ∂h_it

        This costs as much as training's own passes over the responses that have a weight. Responses with advantage 0
        have none.
        """
        self.rows = self._current_rows = self._current_group = None
        self._groups = batch.folds
        ones = torch.ones(len(batch.fold), 1, dtype=batch.loss_weights.logps.dtype, device=batch.fold.device)
        (self.rows,) = passes.sum_by_fold(batch, [batch.loss_weights], ones, self._device, self._dtype)
        if self.sq_norms is not None:
            self.sq_norms = self.sq_norms.new_zeros(batch.num_folds + 1, *self.sq_norms.shape[1:])

    def split_microbatch_gradients(self, batch: Batch, passes: Passes) -> None:
        """Split each microbatch's gradient, held in the rows of its first slice, among its slices. Collective.

        Each slice takes a forward pass and a backward, except the last one, whose gradient is the difference: s slices
        cost (s − 1)/s of training's own passes.
        """
        assert self.rows is not None
        indices = torch.arange(batch.rollout.num_sequences, device=batch.fold.device)
        shares = torch.ones(len(indices), 1, device=indices.device)
        for microbatch in batch.microbatch_rows:
            slices = [group for group in self._groups if group.rows_per_pass[0].start in microbatch]
            remainder = [part.clone() for part in rows_of(self.rows, slices[0].folds)]
            for group in slices[:-1]:
                parts = [indices[rows.start : rows.stop] for rows in group.rows_per_pass]
                (total,) = passes.sum(batch.rollout, len(group.folds), parts, len(parts), [batch.loss_weights], shares)
                copy(rows_of(self.rows, group.folds), total)
                add(remainder, total, -1.0)
            copy(rows_of(self.rows, slices[-1].folds), remainder)

    def finish(self, sizes: Tensor, num_ranks: int, mean: Vector) -> Tensor:
        """Scale rows and square norms to means, once all gradients are complete.

        Args:
            sizes: (F,), n_k over all ranks.
            num_ranks: N.
            mean: The step's gradient, whose square norms come last.

        Returns:
            (3 + F,) fp64. First the number of gradients that came in several parts, of which only the first were
            caught. Then sums of squares over this rank's entries: of the step's gradient minus the mean of all caught
            gradients, of the step's gradient, and of each fold's gradient.
        """
        self._measure_current_rows()
        self._count_bytes()
        factors = float(sizes.sum()) / (num_ranks * sizes)
        if self.rows is None:
            assert self._accumulated is not None
            assert self.sq_norms is not None
            caught = self._accumulated
            self.sq_norms[:-1] *= factors.to(self.sq_norms.device).square().view(-1, 1, 1)
            squares = self.sq_norms[:-1, :, 0].sum(dim=1)
        else:
            caught = [part.sum(dim=0, dtype=self.layout.dtype) for part in self.rows]
            row_factors = factors.to(self.rows[0].device, self.layout.dtype).unsqueeze(1)
            for part in self.rows:
                part *= row_factors
            squares = dot(self.rows, self.rows).to(self.layout.device)
            if self.sq_norms is not None:
                self.sq_norms[:-1] = square_norms(self.layout, self.rows, self._sqrt_metric)
        if self.sq_norms is not None:
            self.sq_norms[-1:] = square_norms(self.layout, [part.unsqueeze(0) for part in mean], self._sqrt_metric)
        differences = (
            entries - part.to(entries.device) / num_ranks for entries, part in zip(mean, caught, strict=True)
        )
        sq_distance = torch.stack([dots(part, part) for part in differences]).sum()
        num_late = torch.full_like(sq_distance, float(self._reduction.num_late_gradients))
        return torch.cat([torch.stack([num_late, sq_distance, dot(mean, mean)]), squares])

    def release(self) -> None:
        """Free the rows."""
        self._reduction.drop()
        self.rows = self.sq_norms = self._sqrt_metric = None
        self._current_group = self._current_rows = self._accumulated = None

    def _count_bytes(self) -> None:
        held_bytes = sum(map(num_bytes, (self.rows, self._current_rows, self._accumulated, self._sqrt_metric)))
        self.peak_bytes = max(self.peak_bytes, held_bytes)

    def _measure_current_rows(self) -> None:
        if self._current_rows is not None and self._current_group is not None:
            assert self.sq_norms is not None
            folds = self._groups[self._current_group].folds
            self.sq_norms[folds.start : folds.stop] = square_norms(self.layout, self._current_rows, self._sqrt_metric)
            self._accumulated = self._accumulated or self.layout.zeros()
            self._count_bytes()
            add(self._accumulated, [part.sum(dim=0) for part in self._current_rows])
        self._current_rows = None
