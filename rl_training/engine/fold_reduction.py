"""Gradients of a backward, caught on the leaves, sent to the processes that keep their entries, and added up by fold.

A hook on a leaf sees this process's gradient alone, before a loop averages it over processes and before it is added to
`.grad`. Leaves are handled in chunks, in one fixed order on all processes: a chunk is sent when it is complete and
those before it are sent, what is missing at the end as zeros. Of every chunk a process receives its own entries from
each of the N, and adds up those of one fold. It sends as many bytes as a reduce-scatter would.

Where each backward reduces by itself (FSDP2), and all processes are in one fold, there are no hooks, and nothing is
sent: what the backward has added to a process's entries of `.grad` is their mean.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rl_training.engine.loss_weights import LossWeights, outputs_and_weights
from rl_training.engine.shards import Shard
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Vector, join


@dataclass(frozen=True)
class Chunk:
    """Entries that are sent at once: of a bucket, or a part of each process's entries of a large parameter."""

    names: tuple[str, ...]
    sends: tuple[tuple[tuple[str, int, int], ...], ...]  # by process: names, and which entries of the flat parameter
    sizes: list[int]  # by process
    bucket: int  # of the layout, and this process's entries in it
    columns: slice


def chunks_of(shard: Shard) -> list[Chunk]:
    """Returns the chunks in the order in which a backward completes them, roughly: the last parameters first."""
    chunks: list[Chunk] = []
    for number, bucket in enumerate(shard.layout.buckets):
        widest = max(1, *map(shard.width, bucket.names))
        width = shard.layout.at_once if len(bucket.names) == 1 else widest
        start = 0
        for begin in range(0, widest, width):
            sends = tuple(
                tuple((name, *_part(shard.cut(name, rank), begin, width)) for name in bucket.names)
                for rank in range(shard.num_ranks)
            )
            sizes = [sum(stop - start for _, start, stop in send) for send in sends]
            columns = slice(start, start + sizes[shard.rank])
            chunks.append(Chunk(bucket.names, sends, sizes, number, columns))
            start = columns.stop
    return chunks[::-1]


def _part(cut: tuple[int, int], begin: int, width: int) -> tuple[int, int]:
    start, stop = cut
    return min(stop, start + begin), min(stop, start + begin + width)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class FoldReduction:
    """Adds what reaches the leaves to a vector for each fold, of which this process keeps its entries.

    The hooks exist only between `arm` and `disarm`, around one backward. All processes arm alike and run one backward.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._chunks = chunks_of(shard)
        self._last_use = {name: number for number, chunk in enumerate(self._chunks) for name in chunk.names}
        # Of its own: a loop's collectives run on the default group in the same backward.
        self._group = dist.new_group() if shard.num_ranks > 1 else None
        self._handles: list[RemovableHandle] = []
        self.bytes_sent = 0
        # Gradients that came after theirs had been sent: of a second backward, or of reentrant checkpointing.
        self.late = 0
        self.forget()

    def forget(self) -> None:
        """Removes the hooks and sends nothing: the loop has left the step, perhaps on this process alone."""
        while self._handles:
            self._handles.pop().remove()
        self._target: Vector = []
        self._held: dict[str, Tensor] = {}  # gradients of leaves whose chunk is not sent yet
        self._sent = len(self._chunks)  # so many chunks, the first ones
        self._rows: Mapping[str, Tensor] = {}  # of the target, where each backward reduces by itself
        self._before: Mapping[str, Tensor | None] = {}  # the gradients that the loop's own reduction adds to

    def add(
        self, target: Vector, fold_of_rank: Sequence[int], fresh: Scores, weights: LossWeights, keep_graph: bool = False
    ) -> None:
        """Adds Σ_ik c_ik ∂log π(t_ik) + d_ik ∂h_ik of each process's rows to the target. A collective.

        fresh       scores of some rows, with graph; not empty on any process
        weights     of these rows, c and d
        keep_graph  for another backward through the same scores
        """
        self.arm(target, fold_of_rank, consume=True)
        try:
            self.shard.backward(*outputs_and_weights(fresh, weights), keep_graph)
        except BaseException:
            self.forget()
            raise
        self.disarm()

    def arm(self, target: Vector, fold_of_rank: Sequence[int], consume: bool = False) -> None:
        """Sets the hooks.

        target        (folds, n) of each bucket
        fold_of_rank  the row of it that the gradient of each process is added to; equal ones are neighbours
        consume       the gradients go nowhere else: they are freed as they arrive
        """
        self.disarm()
        shard, self._target = self.shard, target
        if len(set(fold_of_rank)) == 1 and shard.reduces_each_backward:
            self._rows = shard.layout.by_name(target)
            if consume:
                for name, param in shard.trained.items():
                    hook = functools.partial(self._catch_reduced, name)
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))
            else:
                found = shard.gradients().items()
                self._before = {name: None if gradient is None else gradient.clone() for name, gradient in found}
            return
        self._sent = 0
        first = {fold: fold_of_rank.index(fold) for fold in fold_of_rank}
        self._ranks_of = {fold: slice(rank, rank + fold_of_rank.count(fold)) for fold, rank in first.items()}
        for name, leaf in shard.leaves.items():
            self._handles.append(leaf.register_hook(functools.partial(self._catch, name, consume)))

    def disarm(self) -> None:
        """Adds or sends what is left, and removes the hooks. A collective, if they were set."""
        for name, gradient in (self.shard.gradients() if self._before else {}).items():
            before = self._before[name]
            if gradient is not None:
                self._add_reduced(name, gradient if before is None else gradient - before)
        self._send_complete(all_of_them=True)
        self.forget()

    def _catch_reduced(self, name: str, param: Tensor) -> None:
        """Takes a gradient as soon as it is reduced, so that they never exist all at once."""
        assert param.grad is not None
        self._add_reduced(name, self.shard.own(name, param.grad))
        param.grad = None

    def _add_reduced(self, name: str, mean: Tensor) -> None:
        """Adds a gradient, given as its mean over processes, to the only row of its parameter."""
        rows = self._rows[name]
        rows[0].add_(mean.to(rows), alpha=self.shard.num_ranks)

    def _catch(self, name: str, consume: bool, gradient: Tensor) -> Tensor | None:
        """Takes a leaf's gradient, of this process alone; a consumed one is replaced by zeros that take no memory."""
        if self._sent > self._last_use[name]:
            self.late += 1
            return None
        earlier = self._held.get(name)
        self._held[name] = gradient.detach() if earlier is None else earlier + gradient.detach()
        self._send_complete()
        return _zero(gradient.dtype, gradient.device).expand(gradient.shape) if consume else None

    def _send_complete(self, all_of_them: bool = False) -> None:
        while self._sent < len(self._chunks):
            chunk = self._chunks[self._sent]
            if not all_of_them and not all(name in self._held for name in chunk.names):
                return
            self._send(chunk)
            self._sent += 1
            for name in chunk.names:
                if self._last_use[name] < self._sent:
                    self._held.pop(name, None)

    def _send(self, chunk: Chunk) -> None:
        if not any(name in self._held for name in chunk.names) and self._group is None:
            return
        dtype, device = self.shard.layout.dtype, self.shard.layout.device
        zero = _zero(dtype, device)
        flat = {name: self._held[name].reshape(-1).to(device) for name in chunk.names if name in self._held}
        parts = [
            flat[name][start:stop] if name in flat else zero.expand(stop - start)
            for send in chunk.sends
            for name, start, stop in send
        ]
        sent = join(parts).to(dtype)
        columns = self._target[chunk.bucket][:, chunk.columns]
        if self._group is None:
            columns[next(iter(self._ranks_of))].add_(sent.to(columns.device))
            return
        own = chunk.sizes[self.shard.rank]
        received = sent.new_empty(self.shard.num_ranks, own)
        self.bytes_sent += sent.numel() * sent.element_size()
        dist.all_to_all_single(
            received.view(-1), sent.contiguous(), [own] * self.shard.num_ranks, chunk.sizes, group=self._group
        )
        for fold, ranks in self._ranks_of.items():
            columns[fold].add_(received[ranks].sum(dim=0).to(columns.device))
