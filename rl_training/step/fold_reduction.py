"""Gradients of a backward: caught on the leaves, sent to the ranks that keep their entries, and summed by fold.

A hook on a leaf sees this rank's own gradient, before a loop averages it over ranks and before it is added to `.grad`.
A rank receives its entries of each bucket from all N ranks, and sums them by fold (exchange.py).

If each backward reduces gradients itself (FSDP2) and all ranks are in one fold, nothing is sent: what the backward adds
to a rank's entries of `.grad` is the mean over ranks. catching.py has the ways to catch a backward's gradients.
"""

from __future__ import annotations

from contextlib import nullcontext

from rl_training.parallel.fold_vectors import Receiver
from rl_training.parallel.sharding import Shard
from rl_training.policy.scores import Scores
from rl_training.step.catching import (
    AccumulatedGradients,
    CaughtBackward,
    PendingGradients,
    ReducedGradients,
    SentGradients,
    Timed,
)
from rl_training.step.exchange import Exchange
from rl_training.step.loss_weights import LossWeights, outputs_and_weights


class FoldReduction:
    """Sums the gradients that reach the leaves over backwards, by fold: this rank's entries.

    All ranks call `arm` before the same backward. After a successful backward they call `finish`, which is a
    collective. After a failed one, perhaps on this rank only, they call `drop`, which is not.

    Args:
        shard: The trained parameters.
        timed: Returns a context that adds up the time spent in hooks.
    """

    def __init__(self, shard: Shard, timed: Timed = nullcontext) -> None:
        self.shard = shard
        self._timed = timed
        self._pending = PendingGradients(shard)
        self._exchange = Exchange(shard)
        self._backward: CaughtBackward | None = None  # the one whose gradients are being caught
        # A single bucket's gradients are held together anyway, so a probe's own backward returns them without hooks.
        self._can_skip_hooks = len(self._pending.buckets) == 1 and not shard.gathers_weights
        # Gradients that arrived after their bucket was sent: from a second backward, or from reentrant checkpointing.
        self.num_late_gradients = 0

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent to all ranks, itself included."""
        return self._exchange.bytes_sent

    def close(self) -> None:
        """Remove hooks and free the process group, when training has ended. Collective."""
        self.drop()
        self._exchange.close()

    def backward(self, receiver: Receiver, fresh: Scores, loss_weights: LossWeights, keep_graph: bool = False) -> None:
        """Hand Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik of every rank's rows to `receiver`. Collective.

        Args:
            receiver: Takes the gradients bucket by bucket.
            fresh: Scores of some rows, with graph. Not empty on any rank.
            loss_weights: c and d of these rows.
            keep_graph: Allow another backward through the same scores.
        """
        self.arm(receiver, consume=True)
        try:
            gradients = self.shard.backward(*outputs_and_weights(fresh, loss_weights), keep_graph)
            if self._can_skip_hooks:
                self._pending.replace(gradients)
            self.finish()
        except BaseException:
            self.drop()
            raise

    def arm(self, receiver: Receiver, consume: bool = False) -> None:
        """Start catching the gradients of one backward.

        Args:
            receiver: Takes them bucket by bucket. The ranks of a fold are neighbours, equally many for each fold.
            consume: Nothing else needs the gradients, so they are freed as they arrive.
        """
        self.finish()
        shard = self.shard
        if receiver.num_folds == 1 and shard.reduces_each_backward:
            backward_class = ReducedGradients if consume else AccumulatedGradients
            self._backward = backward_class(shard, self._pending, receiver, self._timed)
        else:
            self._exchange.open()
            leaves = {} if consume and self._can_skip_hooks else shard.leaves
            self._backward = SentGradients(shard, self._pending, receiver, self._timed, self._exchange, leaves, consume)
        try:
            self._backward.begin()
        except BaseException:  # some hooks may be set already
            self.drop()
            raise

    def raise_error(self) -> None:
        """Raise the error that a hook of the loop's own backward has met, if any. Not collective."""
        error = None if self._backward is None else self._backward.error
        if error is not None:
            self.drop()
            raise error

    def finish(self) -> None:
        """Hand on or send what is left, and remove the hooks, after the backward. Collective if hooks were set.

        Raises:
            Exception: The error that a hook of the loop's own backward has met.
        """
        self.raise_error()
        if self._backward is not None:
            self._backward.finish()
        self.drop()

    def drop(self) -> None:
        """Remove the hooks and send nothing: a backward or a step has ended early, perhaps on this rank only."""
        if self._backward is not None:
            self.num_late_gradients += self._backward.num_late_gradients
            self._backward.drop()
        self._backward = None
