"""Gradients of a backward: caught on the leaves, sent to the processes that keep their entries, and summed by fold.

A hook on a leaf sees this process's own gradient, before a loop averages it over processes and before it is added to
`.grad`. All processes send the layout's buckets in one fixed order: a bucket is sent when it is complete and those
before it are sent; gradients that are missing at the end are sent as zeros. A process receives its entries of each
bucket from all N processes, and sums them by fold. It sends as many bytes as a reduce-scatter would.

Where each backward reduces by itself (FSDP2) and all processes are in one fold, there are no hooks and nothing is sent:
what the backward adds to a process's entries of `.grad` is the mean over processes.
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rl_training.gradients.loss_weights import LossWeights, outputs_and_weights
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Vector, constant, join
from rl_training.policy.scores import Scores

NOT_ALONE = "measuring has failed within this process's backward, and the others cannot be told, so training ends"


class FoldReduction:
    """The sums over backwards of the gradients that reach the leaves, by fold: this process's entries.

    All processes call `arm` before the same backward. After one that has succeeded they call `finish`, a collective;
    after one that has failed, perhaps on this process alone, `drop`, which is none.
    """

    def __init__(self, shard: Shard, timed: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Prepare to catch the gradients of a shard's leaves.

        Args:
            shard: of the trained parameters.
            timed: returns a context that adds up the time that hooks take.
        """
        self.shard = shard
        self._timed = timed
        self._buckets = shard.layout.buckets
        self._bucket_of = {name: number for number, bucket in enumerate(self._buckets) for name in bucket.names}
        # Made when something is first sent. A loop's collectives run on the default group in the same backward.
        self._group: dist.ProcessGroup | None = None
        # The gradients of a single bucket are held together anyway, so a probe's own backward returns them, unhooked.
        self._returned = len(self._buckets) == 1 and not shard.gathers_weights
        self._handles: list[RemovableHandle] = []
        self.bytes_sent = 0
        # Gradients that arrived after their bucket was sent: from a second backward, or from reentrant checkpointing.
        self.num_late_gradients = 0
        self.drop()

    def close(self) -> None:
        """Destroy the process group, if there is one, when training has ended. A collective."""
        self.drop()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def drop(self) -> None:
        """Remove the hooks and send nothing: a backward or a step has ended early, perhaps on this process alone."""
        while self._handles:
            self._handles.pop().remove()
        self._target: Vector = []
        self._held: dict[str, Tensor] = {}  # gradients that are not sent or added yet
        # The number of unsent buckets, which are the first ones: a backward roughly completes the last ones first.
        self._unsent = 0
        self._reduced = False  # whether each backward reduces by itself
        self._before: Vector = []  # `.grad` before such a backward
        self._error: Exception | None = None  # in a hook of the loop's own backward, which has gone on

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
                self._held = gradients
            self.finish()
        except BaseException:
            self.drop()
            raise

    def arm(self, target: Vector, consume: bool = False) -> None:
        """Set the hooks for one backward.

        Args:
            target: (folds, n) per bucket. The processes of a fold are neighbours, equally many for each fold.
            consume: nobody else needs the gradients, so they are freed as they arrive.
        """
        self.finish()
        shard = self.shard
        self._target = target
        self._reduced = len(target[0]) == 1 and shard.reduces_each_backward
        if not self._reduced:
            if shard.num_ranks > 1 and self._group is None:
                self._group = dist.new_group()
            self._unsent = len(self._buckets)
            leaves = {} if consume and self._returned else shard.leaves
            hook = self._consume if consume else self._catch
            for name, leaf in leaves.items():
                self._handles.append(leaf.register_hook(functools.partial(hook, name)))
        elif consume:
            for name, param in shard.trained.items():
                catch = functools.partial(self._catch_reduced, name)
                self._handles.append(param.register_post_accumulate_grad_hook(catch))
        else:
            self._hold_gradients()
            self._before = [torch.cat(self._taken(bucket.names, bucket.sizes)) for bucket in self._buckets]

    def raise_error(self) -> None:
        """Raise what a hook of the loop's own backward has met, if anything. No collective."""
        if self._error is not None:
            error = self._error
            self.drop()
            raise error

    def finish(self) -> None:
        """Add or send what is left, and remove the hooks: the backward is over. A collective, if they were set.

        Raises:
            Exception: The one that a hook of the loop's own backward has met.
        """
        self.raise_error()
        if self._before:
            self._hold_gradients()
        if self._reduced:
            for number in range(len(self._buckets)):
                self._add_reduced(number)
        while self._unsent:
            self._send_next()
        self.drop()

    def _hold_gradients(self) -> None:
        self._held = {name: gradient for name, gradient in self.shard.gradients().items() if gradient is not None}

    def _catch_reduced(self, name: str, param: Tensor) -> None:
        """Take a gradient as soon as it is reduced, so that never all of them exist."""
        assert param.grad is not None
        self._hold(name, self.shard.local(name, param.grad))
        param.grad = None
        if self._is_complete(self._bucket_of[name]):
            self._add_reduced(self._bucket_of[name])

    def _add_reduced(self, number: int) -> None:
        """Add what a backward has left in a bucket's `.grad`, means over processes, to the only row."""
        bucket = self._buckets[number]
        rows = self._target[number]
        if any(name in self._held for name in bucket.names):
            with self._timed():
                mean = torch.cat(self._taken(bucket.names, bucket.sizes))
                if self._before:
                    mean -= self._before[number]
                rows[0].add_(mean.to(rows), alpha=self.shard.num_ranks)

    def _hold(self, name: str, gradient: Tensor) -> None:
        self._held[name] = self._held[name] + gradient if name in self._held else gradient

    def _is_complete(self, number: int) -> bool:
        return all(name in self._held for name in self._buckets[number].names)

    def _taken(self, names: Sequence[str], sizes: Iterable[int]) -> list[Tensor]:
        """Return the held gradients of these parameters, and hold them no longer.

        Parameters without a gradient get zeros that take no memory.

        Args:
            names: of the parameters.
            sizes: the number of entries of each.
        """
        device = self.shard.layout.device
        zero = constant(0.0, self.shard.layout.dtype, device)
        return [
            self._held.pop(name).reshape(-1).to(device) if name in self._held else zero.expand(size)
            for name, size in zip(names, sizes, strict=True)
        ]

    def _catch(self, name: str, gradient: Tensor) -> None:
        """Take a leaf's gradient of the loop's own backward, which an error here does not end on a single process."""
        if self._error is not None:  # autograd runs the hooks of a leaf that it has begun
            return
        try:
            self._take(name, gradient)
        except Exception as error:
            if self.shard.num_ranks > 1:  # the others wait for what this process sends
                error.add_note(NOT_ALONE)
                raise
            self.drop()
            traceback.clear_frames(error.__traceback__)  # they hold gradients, and memory may be what is missing
            self._error = error

    def _consume(self, name: str, gradient: Tensor) -> Tensor:
        """Take a leaf's gradient of a probe's backward, and replace it by zeros that take no memory."""
        self._take(name, gradient)
        return constant(0.0, gradient.dtype, gradient.device).expand(gradient.shape)

    def _take(self, name: str, gradient: Tensor) -> None:
        if self._bucket_of[name] >= self._unsent:
            self.num_late_gradients += 1
            return
        self._hold(name, gradient.detach())
        while self._unsent and self._is_complete(self._unsent - 1):
            self._send_next()

    def _send_next(self) -> None:
        """Send the last unsent bucket, a large parameter in parts, and add this process's entries to their folds."""
        self._unsent -= 1
        with self._timed():
            self._send(self._buckets[self._unsent].names, self._target[self._unsent])

    def _send(self, names: Sequence[str], rows: Tensor) -> None:
        """Send the gradients of a bucket's parameters, and add what is received to `rows`, (folds, n)."""
        shard = self.shard
        layout = self.shard.layout
        gradients = self._taken(names, map(shard.numel, names))
        if self._group is None:  # all entries belong to this process
            rows[0].add_(join(gradients).to(rows.device))
            return
        for first in range(0, max(map(shard.width, names)), layout.chunk_size):
            part = slice(first, first + layout.chunk_size)
            parts = [
                [flat[start:stop][part] for flat, (start, stop) in zip(gradients, cuts, strict=True)]
                for cuts in zip(*(shard.cuts[name] for name in names), strict=True)
            ]
            sent = join([*itertools.chain(*parts)]).to(layout.dtype)
            received = self._exchanged(sent, [sum(map(len, pieces)) for pieces in parts])
            by_fold = received.unflatten(0, (len(rows), -1))
            rows[:, part].add_((by_fold.sum(dim=1) if by_fold.shape[1] > 1 else by_fold[:, 0]).to(rows.device))

    def _exchanged(self, sent: Tensor, sizes: list[int]) -> Tensor:
        """Exchange entries between processes. A collective.

        Args:
            sent: the entries for each process, one after another.
            sizes: the number of entries for each process.

        Returns:
            What each process has sent to this one, (processes, n).
        """
        received = sent.new_empty(len(sizes), sizes[self.shard.rank])
        self.bytes_sent += sent.nbytes
        dist.all_to_all_single(received.view(-1), sent, [received.shape[1]] * len(sizes), sizes, group=self._group)
        return received
