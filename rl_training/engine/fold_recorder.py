"""The training gradient of each fold of a step, this process's entries, kept as rows or measured as square norms.

A loop's loss is a mean over the B sequences that a process has of the step, and its gradient the mean over N processes.
So of fold k, with n_k sequences of all Σ n, the leaves see parts that add up to

    N n_k / Σ n · g_k,        g_k the mean gradient of the fold,

which is undone once, at the end of the step: the optimizer's gradient is the mean of the rows, weighted by n_k.
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
from rl_training.step.runtime import Runtime, rows_by_fold, sum_gradients


@dataclass(frozen=True)
class FoldGradients:
    """The gradients of a step's folds, and what it takes to hold them against the step's own."""

    rows: Vector | None  # (F, n) of each bucket, where they are kept
    sq_norms: Tensor | None  # as `Gradients` has them
    sums: Tensor  # (3 + F,) fp64, as `FoldRecorder.finish` returns them, over all processes

    @property
    def squares(self) -> Tensor:
        """(F,) fp64, |g_k|² over all processes."""
        return self.sums[3:]


class FoldRecorder:
    """Catches the gradients of one step at a time. Nothing of parameter size is held between steps.

    offload  rows are kept in host memory    dtype  and in this one; None: as the layout's
    """

    def __init__(self, reduction: FoldReduction, offload: bool = False, dtype: torch.dtype | None = None) -> None:
        self._reduction, self.layout = reduction, reduction.shard.layout
        self._device, self._dtype = "cpu" if offload else None, dtype
        self.rows: Vector | None = None  # (F, n) of each bucket
        # (F + 1, parameters, 2) fp64: of this process's entries, |g_k|² and Σ P g_k², and last those of the step's g.
        self.sq_norms: Tensor | None = None
        self.most_bytes = 0  # of all vectors that the step has kept here at once
        self._groups: Sequence[FoldGroup] = ()
        self._roots: Vector | None = None
        self._group: int | None = None  # whose gradients arrive
        self._current_rows: Vector | None = None  # its rows, where rows are not kept
        self._accumulated: Vector | None = None  # and of all that have passed

    def make_room(self, groups: Sequence[FoldGroup], needs: Need, is_sliced: bool) -> None:
        """Begin a step with what probes need of its folds.

        is_sliced  folds cut microbatches: their norms take rows
        """
        shard, roots = self._reduction.shard, None
        if Need.SQ_NORMS in needs:
            roots = sqrt_preconditioner(self.layout, shard.weights(), view_optimizer(shard).states)
        self.start_step(groups, Need.FOLD_GRADIENTS in needs or (is_sliced and roots is not None), roots)

    def start_step(self, groups: Sequence[FoldGroup], keep_rows: bool = True, roots: Vector | None = None) -> None:
        """Make room for the step that begins.

        keep_rows  keep every row
        roots      √P of Adam's metric, nan where it is not one; square norms are measured where it is given, with the
                   rows of one group of folds at a time in memory where rows are not kept
        """
        self.release()
        self._reduction.num_late_gradients = self.most_bytes = 0
        self._groups, self._roots = groups, roots
        num_folds = groups[-1].folds.stop
        if keep_rows:
            self.rows = self.layout.zeros(num_folds, device=self._device, dtype=self._dtype)
        if roots is not None:
            self.sq_norms = torch.zeros(
                num_folds + 1, len(self.layout.names), 2, dtype=torch.float64, device=self.layout.device
            )

    def arm(self, first_row: int) -> None:
        """Set the hooks: the gradients that reach the leaves from now on are of the microbatch that begins there.

        It sets none where the step keeps nothing of them.
        """
        if self.rows is None and self.sq_norms is None:
            return
        number = next(i for i, group in enumerate(self._groups) if any(first_row in rows for rows in group.passes))
        if number != self._group:
            self._measure_current_rows()
        self._group = number
        group = self._groups[number]
        if self.rows is not None:
            target = rows_of(self.rows, group.folds)
        else:
            if self._current_rows is None:
                self._current_rows = self.layout.zeros(len(group.folds))
            target = self._current_rows
        self._reduction.arm(target)

    def finish_backward(self) -> None:
        """Add up what the hooks have caught, and remove them. A collective, if they were set."""
        self._reduction.finish()

    def drop_backward(self) -> None:
        """Remove the hooks: the backward has failed, perhaps on this process alone."""
        self._reduction.drop()

    def complete(
        self, batch: Batch, runtime: Runtime, mean: Mapping[str, Tensor], optimizer: OptimizerView
    ) -> FoldGradients:
        """Return the gradients of the folds of a step whose gradients are all in. A collective.

        Args:
            batch: The step's.
            runtime: What makes those that the hooks have not caught.
            mean: The step's gradient, before clipping.
            optimizer: Before the step.
        """
        if batch.has_mixed_folds:
            self._make_anew(batch, runtime)
        elif batch.has_slices:
            self.split_microbatch_gradients(batch, runtime)
        squares = self.finish(batch.fold_sizes, runtime.ranks.count, self.layout.vector(mean.values()))
        sq_norms = None if self.sq_norms is None else runtime.ranks.reduce(self.sq_norms)
        if sq_norms is not None and optimizer.states is not None:  # nothing in any metric, cold or warm
            sq_norms[:, [not state.moves for state in optimizer.states.values()], 1] = 0.0
        return FoldGradients(self.rows, sq_norms, runtime.ranks.reduce(squares))

    def _make_anew(self, batch: Batch, runtime: Runtime) -> None:
        """Replace what the hooks have caught, of microbatches, by the gradients of folds of whole prompts.

        The loss's weights on log-probabilities and entropies say what each response adds to the gradient of its fold:

            g_k = 1/n_k Σ_{i in fold k} Σ_t c_it ∂log π(t_it) + d_it ∂h_it

        It costs as much as training's own passes over the responses that have a weight: with an advantage of 0 none
        has. A collective.
        """
        self.rows = self._current_rows = self._group = None
        self._groups = batch.folds
        ones = torch.ones(len(batch.fold), 1, dtype=batch.loss_weights.logps.dtype, device=batch.fold.device)
        (self.rows,) = rows_by_fold(batch, runtime, [batch.loss_weights], ones, self._device, self._dtype)
        if self.sq_norms is not None:
            self.sq_norms = self.sq_norms.new_zeros(batch.num_folds + 1, *self.sq_norms.shape[1:])

    def split_microbatch_gradients(self, batch: Batch, runtime: Runtime) -> None:
        """Split each microbatch's gradient, in the rows of its first slice, among the folds that cut it in slices.

        Each slice takes a forward pass and a backward, except the last one, whose gradient is the difference: s slices
        cost (s − 1)/s of training's own passes. A collective.
        """
        assert self.rows is not None
        numbers = torch.arange(batch.rollout.num_sequences, device=batch.fold.device)
        shares = torch.ones(len(numbers), 1, device=numbers.device)
        for microbatch in batch.microbatch_rows:
            slices = [group for group in self._groups if group.passes[0].start in microbatch]
            rest = [part.clone() for part in rows_of(self.rows, slices[0].folds)]
            for group in slices[:-1]:
                passes = [numbers[rows.start : rows.stop] for rows in group.passes]
                (total,) = sum_gradients(batch.rollout, runtime, len(group.folds), passes, [batch.loss_weights], shares)
                copy(rows_of(self.rows, group.folds), total)
                add(rest, total, -1.0)
            copy(rows_of(self.rows, slices[-1].folds), rest)

    def finish(self, sizes: Tensor, num_ranks: int, mean: Vector) -> Tensor:
        """Put rows and square norms on the scale of means: all gradients are in.

        Returns (3 + F,) fp64: how many gradients came in several parts, of which only the first were caught; and sums
        of squares over this process's entries, of the step's gradient less the mean of all that were caught, of the
        step's gradient, and of each fold's.

        sizes  (F,), n_k over all processes
        mean   the step's gradient, whose square norms come last
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
            of_rows = factors.to(self.rows[0].device, self.layout.dtype).unsqueeze(1)
            for part in self.rows:
                part *= of_rows
            squares = dot(self.rows, self.rows).to(self.layout.device)
            if self.sq_norms is not None:
                self.sq_norms[:-1] = square_norms(self.layout, self.rows, self._roots)
        if self.sq_norms is not None:
            self.sq_norms[-1:] = square_norms(self.layout, [part.unsqueeze(0) for part in mean], self._roots)
        rest = (entries - part.to(entries.device) / num_ranks for entries, part in zip(mean, caught, strict=True))
        off = torch.stack([dots(part, part) for part in rest]).sum()
        late = torch.full_like(off, float(self._reduction.num_late_gradients))
        return torch.cat([torch.stack([late, off, dot(mean, mean)]), squares])

    def release(self) -> None:
        """Free the rows."""
        self._reduction.drop()
        self.rows = self.sq_norms = self._current_rows = self._accumulated = self._roots = self._group = None

    def _count_bytes(self) -> None:
        held = sum(map(num_bytes, (self.rows, self._current_rows, self._accumulated, self._roots)))
        self.most_bytes = max(self.most_bytes, held)

    def _measure_current_rows(self) -> None:
        if self._current_rows is not None and self._group is not None:
            assert self.sq_norms is not None
            folds = self._groups[self._group].folds
            self.sq_norms[folds.start : folds.stop] = square_norms(self.layout, self._current_rows, self._roots)
            self._accumulated = self._accumulated or self.layout.zeros()
            self._count_bytes()
            add(self._accumulated, [part.sum(dim=0) for part in self._current_rows])
        self._current_rows = None
