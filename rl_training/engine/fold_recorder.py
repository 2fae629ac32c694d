"""The training gradient of each fold of a step: this rank's entries, stored as vectors or as square norms.

A loop's loss is a mean over the B sequences that a rank has in the step, and its gradient is the mean over N ranks. For
fold k, with n_k of all Σ n sequences, the gradients that reach the leaves therefore add up to

    N n_k / Σ n · g_k,        g_k the mean gradient of the fold.

This factor is undone once, at the end of the step. The optimizer's gradient is then the mean of the g_k, weighted by
n_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.engine.gradient_check import CaughtSums
from rl_training.parallel.fold_vectors import FoldVectors, Receiver, fold_dtype
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.vectors import Vector, num_bytes, sample_entries, square_norms
from rl_training.step.batch import Batch
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import FoldGroup
from rl_training.step.passes import Passes, Weightings


@dataclass
class _RecordedStep:
    """The gradients of one step by fold: what is stored of each fold, and what is only passing through."""

    fold_groups: Sequence[FoldGroup]

    # Stored of each fold. Its samples always are; its vector and its square norms as probes need them.
    samples: list[Tensor]  # (K, samples) per bucket: sampled entries, which tell whether all gradients were caught
    by_fold: FoldVectors | None  # all entries
    # (K + 1, parameters, 2) fp64: |g_k|² and Σ P g_k² of each fold, then of the step's gradient. Over this rank's
    # entries until `complete`, then over all.
    sq_norms: Tensor | None
    sqrt_metric: Vector | None  # √P of Adam's metric; set if square norms are stored

    # Passing through: the vectors of one group of folds at a time. They are set if vectors are not stored, or are
    # rounded and made of several passes, each of which would be rounded. They end as square norms, or are stored.
    fold_group: FoldGroup | None = None  # whose gradients arrive; also if they arrive in the stored vectors
    passing_vectors: FoldVectors | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of all vectors held now."""
        held = [vectors for vectors in (self.by_fold, self.passing_vectors) if vectors is not None]
        return sum(vectors.num_bytes for vectors in held) + num_bytes(self.sqrt_metric)


class FoldRecorder:
    """Catches the gradients of one step at a time. It holds nothing of parameter size between steps.

    The calls of a measured step, in their order:

        start_step   its folds are planned: allocate what it stores
        arm          before each backward of the loop, whose hooks `reduction` removes
        recompute    all backwards are done: if folds are not of these, replace what hooks have caught
        complete     finish vectors and square norms, for `by_fold` and `sq_norms`
        release      the step has ended, at any of these points

    Args:
        reduction: Sums the gradients of each backward by fold.
        offload: Keep vectors in host memory.
        dtype: Dtype in which vectors are kept. None: 8 bits if they are large, otherwise the layout's.
    """

    def __init__(self, reduction: FoldReduction, offload: bool = False, dtype: torch.dtype | None = None) -> None:
        self.reduction = reduction
        self.layout = reduction.shard.layout
        self.peak_bytes = 0  # most bytes of vectors held here at once during the step
        self._device = "cpu" if offload else None
        self._dtype = fold_dtype(self.layout, dtype)
        self._step: _RecordedStep | None = None  # None between steps, and at a step that stores nothing

    @property
    def by_fold(self) -> FoldVectors | None:
        """The vectors of the step's folds. None if they are not stored."""
        return None if self._step is None else self._step.by_fold

    @property
    def sq_norms(self) -> Tensor | None:
        """The square norms of the step's folds; once complete, over all ranks. None if they are not stored."""
        return None if self._step is None else self._step.sq_norms

    def start_step(
        self, fold_groups: Sequence[FoldGroup], *, stores_vectors: bool = True, sqrt_metric: Vector | None = None
    ) -> None:
        """Free what is stored, and allocate what a step with these folds stores.

        Args:
            fold_groups: The folds of the step.
            stores_vectors: Store every vector. Otherwise only one fold group's are in memory at a time.
            sqrt_metric: √P of Adam's metric, nan if the optimizer defines none. Square norms are stored if it is given.
        """
        self.release()
        self.reduction.num_late_gradients = 0
        self.peak_bytes = 0
        if not stores_vectors and sqrt_metric is None:
            return
        layout = self.layout
        num_folds = fold_groups[-1].folds.stop
        samples = [
            torch.zeros(num_folds, len(columns), dtype=layout.dtype, device=layout.device)
            for columns in layout.sampled_columns
        ]
        by_fold = FoldVectors(layout, num_folds, self._dtype, self._device) if stores_vectors else None
        sq_norms = None
        if sqrt_metric is not None:
            sq_norms = torch.zeros(num_folds + 1, len(layout.names), 2, dtype=torch.float64, device=layout.device)
        self._step = _RecordedStep(fold_groups, samples, by_fold, sq_norms, sqrt_metric)

    def arm(self, first_row: int) -> None:
        """Set the hooks for the microbatch that starts at `first_row`, if the step stores anything."""
        step = self._step
        if step is None:
            return
        fold_group = next(part for part in step.fold_groups if any(first_row in rows for rows in part.rows_per_pass))
        if fold_group is not step.fold_group:
            self._finish_fold_group(step)
        step.fold_group = fold_group
        is_rounded = self._dtype.itemsize < self.layout.dtype.itemsize
        is_passing = passes_through(fold_group, step.by_fold is not None, is_rounded)
        if step.passing_vectors is None and is_passing:
            step.passing_vectors = FoldVectors(self.layout, len(fold_group.folds))
        self.reduction.arm(self._receiver(step, fold_group.folds))

    def _receiver(self, step: _RecordedStep, folds: range) -> Receiver:
        """Return what takes the gradients of these folds: the vectors that they go to, and the samples."""
        if step.passing_vectors is not None:
            receiver = step.passing_vectors.receiver(range(len(folds)))
        else:
            assert step.by_fold is not None
            receiver = step.by_fold.receiver(folds)

        def take(bucket: int, first: int, values: Tensor) -> None:
            receiver.take(bucket, first, values)
            samples, columns = self.layout.sampled_within(bucket, first, values.shape[1])
            step.samples[bucket][folds.start : folds.stop, samples] += values[:, columns]

        return Receiver(len(folds), take)

    def recompute(self, batch: Batch, passes: Passes) -> None:
        """Replace the microbatch gradients caught by hooks with recomputed gradients of whole-prompt folds. Collective.

        The loss's weights on log-probabilities and entropies determine what each response adds to its fold's gradient:

            g_k = 1/n_k Σ_{i in fold k} Σ_t c_it ∂log π(t_it) + d_it ∂h_it

        This costs as much as training's own passes over the responses that have a weight. Responses with advantage 0
        have none.
        """
        self.start_step(batch.fold_groups, sqrt_metric=None if self._step is None else self._step.sqrt_metric)
        step = self._step
        assert step is not None
        ones = torch.ones(len(batch.fold), 1, dtype=batch.loss_weights.logps.dtype, device=batch.fold.device)
        weightings = Weightings([batch.loss_weights], shares=ones)
        passes.send_gradients(batch, weightings, lambda _, folds: self._receiver(step, folds))

    def complete(self, sizes: Tensor, mean: Mapping[str, Tensor], ranks: Ranks) -> CaughtSums:
        """Complete vectors and square norms, once all gradients have arrived. Collective.

        Args:
            sizes: (K,), n_k over all ranks.
            mean: The step's gradient by parameter, whose square norms come last.
            ranks: The ranks that train together.

        Returns:
            What tells whether the gradients by fold are the step's.
        """
        step = self._step
        assert step is not None
        layout = self.layout
        factors = float(sizes.sum()) / (ranks.count * sizes)
        self._finish_fold_group(step)
        if step.by_fold is not None:
            step.by_fold.complete()
            step.by_fold.factors = factors
            self._measure(step, step.by_fold, range(len(sizes)))
        self.peak_bytes = max(self.peak_bytes, step.num_bytes)
        if step.sq_norms is not None:
            step.sq_norms[:-1] *= factors.to(step.sq_norms.device).square().view(-1, 1, 1)
            whole = [part.unsqueeze(0) for part in layout.vector(mean.values())]
            step.sq_norms[-1:] = square_norms(layout, whole, step.sqrt_metric)
            step.sq_norms = ranks.reduce(step.sq_norms)
        caught = torch.cat(step.samples, dim=1).double()
        sampled_mean = sample_entries(layout, mean.values())
        difference = sampled_mean - caught.sum(dim=0) / ranks.count
        samples = [difference, sampled_mean, *(factors.to(caught)[:, None] * caught)]
        squares = torch.stack([part.square().sum() for part in samples])
        num_late = squares.new_full((1,), float(self.reduction.num_late_gradients))
        sums = torch.cat([num_late, squares * (layout.num_entries / max(1, len(sampled_mean)))])
        late, sq_distance, sq_norm, *fold_sq_norms = ranks.reduce(sums).tolist()
        return CaughtSums(late, sq_distance, sq_norm, fold_sq_norms)

    def release(self) -> None:
        """Free what is stored."""
        self.reduction.drop()
        self._step = None

    def _finish_fold_group(self, step: _RecordedStep) -> None:
        """Store the vectors that are passing through, or measure their square norms."""
        vectors = step.passing_vectors
        if vectors is None:
            return
        assert step.fold_group is not None
        folds = step.fold_group.folds
        vectors.complete()
        self.peak_bytes = max(self.peak_bytes, step.num_bytes)
        if step.by_fold is not None:
            step.by_fold.replace(folds, vectors.of_folds(range(len(folds))))
        else:
            self._measure(step, vectors, folds)
        step.passing_vectors = None

    def _measure(self, step: _RecordedStep, vectors: FoldVectors, folds: range) -> None:
        """Measure the square norms of the vectors of these folds, if they are stored."""
        if step.sq_norms is None:
            return
        for index, fold in enumerate(folds):
            vector = vectors.of_folds(range(index, index + 1))
            step.sq_norms[fold : fold + 1] = square_norms(self.layout, vector, step.sqrt_metric)


def passes_through(fold_group: FoldGroup, stores_vectors: bool, is_rounded: bool) -> bool:
    """Return whether a fold group's vectors are only stored or measured once all of its backwards have run.

    Args:
        fold_group: The folds and their passes.
        stores_vectors: Every fold's vector is stored.
        is_rounded: It is stored in fewer bits, so that rounding the sum at each pass would add up.
    """
    return not stores_vectors or (is_rounded and len(fold_group.rows_per_pass) > 1)
