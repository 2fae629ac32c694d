"""Gradients of a backward: caught on the leaves, sent to the processes that keep their entries, and summed by fold.

A hook on a leaf sees this process's own gradient, before a loop averages it over processes and before it is added to
`.grad`. A process receives its entries of each bucket from all N processes, and sums them by fold (exchange.py).

Where each backward reduces by itself (FSDP2) and all processes are in one fold, nothing is sent: what the backward adds
to a process's entries of `.grad` is the mean over processes. catching.py has the ways to catch a backward's gradients.
"""

from __future__ import annotations

from contextlib import nullcontext

from rl_training.gradients.catching import (
    CaughtBackward,
    GrownGradients,
    HeldGradients,
    ReducedGradients,
    SentGradients,
    Timed,
)
from rl_training.gradients.exchange import Exchange
from rl_training.gradients.loss_weights import LossWeights, outputs_and_weights
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Vector
from rl_training.policy.scores import Scores


class FoldReduction:
    """The sums over backwards of the gradients that reach the leaves, by fold: this process's entries.

    All processes call `arm` before the same backward. After one that has succeeded they call `finish`, a collective;
    after one that has failed, perhaps on this process alone, `drop`, which is none.
    """

    def __init__(self, shard: Shard, timed: Timed = nullcontext) -> None:
        """Prepare to catch the gradients of a shard's leaves.

        Args:
            shard: of the trained parameters.
            timed: returns a context that adds up the time that hooks take.
        """
        self.shard = shard
        self._timed = timed
        self._held = HeldGradients(shard)
        self._exchange = Exchange(shard)
        self._backward: CaughtBackward | None = None  # whose gradients are being caught
        # The gradients of a single bucket are held together anyway, so a probe's own backward returns them, unhooked.
        self._returned = len(self._held.buckets) == 1 and not shard.gathers_weights
        # Gradients that arrived after their bucket was sent: from a second backward, or from reentrant checkpointing.
        self.num_late_gradients = 0

    @property
    def bytes_sent(self) -> int:
        """The bytes that this process has sent to all, itself included."""
        return self._exchange.bytes_sent

    def close(self) -> None:
        """End for good: training has ended. A collective."""
        self.drop()
        self._exchange.close()

    def add(self, target: Vector, fresh: Scores, weights: LossWeights, keep_graph: bool = False) -> None:
        """Add Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik of every process's rows to `target`. A collective.

        Args:
            target: (folds, n) per bucket.
            fresh: scores of some rows, with graph; not empty on any process.
            weights: c and d of these rows.
            keep_graph: allow another backward through the same scores.
        """
        self.arm(target, consume=True)
        try:
            gradients = self.shard.backward(*outputs_and_weights(fresh, weights), keep_graph)
            if self._returned:
                self._held.replace(gradients)
            self.finish()
        except BaseException:
            self.drop()
            raise

    def arm(self, target: Vector, consume: bool = False) -> None:
        """Begin to catch the gradients of one backward.

        Args:
            target: (folds, n) per bucket. The processes of a fold are neighbours, equally many for each fold.
            consume: nobody else needs the gradients, so they are freed as they arrive.
        """
        self.finish()
        shard = self.shard
        if len(target[0]) == 1 and shard.reduces_each_backward:
            reduced = ReducedGradients if consume else GrownGradients
            self._backward = reduced(shard, self._held, target, self._timed)
        else:
            self._exchange.open()
            leaves = {} if consume and self._returned else shard.leaves
            self._backward = SentGradients(shard, self._held, target, self._timed, self._exchange, leaves, consume)
        try:
            self._backward.begin()
        except BaseException:  # half of the hooks may be set
            self.drop()
            raise

    def raise_error(self) -> None:
        """Raise what a hook of the loop's own backward has met, if anything. No collective."""
        error = None if self._backward is None else self._backward.error
        if error is not None:
            self.drop()
            raise error

    def finish(self) -> None:
        """Add or send what is left, and remove the hooks: the backward is over. A collective, if they were set.

        Raises:
            Exception: The one that a hook of the loop's own backward has met.
        """
        self.raise_error()
        if self._backward is not None:
            self._backward.finish()
        self.drop()

    def drop(self) -> None:
        """Remove the hooks and send nothing: a backward or a step has ended early, perhaps on this process alone."""
        if self._backward is not None:
            self.num_late_gradients += self._backward.num_late_gradients
            self._backward.drop()
        self._backward = None
