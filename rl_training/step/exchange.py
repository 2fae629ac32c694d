"""Send the entries of gradients to the ranks that keep them, where they are summed by fold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from rl_training.parallel.fold_vectors import Receiver
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import join


class Exchange:
    """Sends each rank its entries of a bucket. It transfers as many bytes as a reduce-scatter would."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        # Created on first use. The loop's collectives run on the default group during the same backward.
        self._group: dist.ProcessGroup | None = None
        self.bytes_sent = 0

    def open(self) -> None:
        """Create the process group, if there are several ranks and it does not exist yet. Collective."""
        if self._shard.num_ranks > 1 and self._group is None:
            self._group = dist.new_group()

    def close(self) -> None:
        """Destroy the process group, if there is one, when training has ended. Collective."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def send(self, names: Sequence[str], gradients: Sequence[Tensor], bucket: int, receiver: Receiver) -> None:
        """Send the gradients of a bucket's parameters, in parts if large, and hand on what arrives. Collective.

        Args:
            names: Parameter names.
            gradients: This rank's gradients, flat and whole.
            bucket: The index of the bucket.
            receiver: Takes this rank's entries. The ranks of a fold are neighbours.
        """
        shard = self._shard
        if self._group is None:  # this rank keeps all entries
            receiver.take(bucket, 0, join(gradients).to(shard.layout.dtype).unsqueeze(0))
            return
        for first in range(0, max(map(shard.max_entries, names)), shard.layout.chunk_size):
            part = slice(first, first + shard.layout.chunk_size)
            parts = [
                [flat[start:stop][part] for flat, (start, stop) in zip(gradients, cuts, strict=True)]
                for cuts in zip(*(shard.entry_ranges[name] for name in names), strict=True)
            ]
            sent = join([*itertools.chain(*parts)]).to(shard.layout.dtype)
            received = self._exchange_entries(sent, [sum(map(len, pieces)) for pieces in parts])
            by_fold = received.unflatten(0, (receiver.num_folds, -1))
            receiver.take(bucket, first, by_fold.sum(dim=1) if by_fold.shape[1] > 1 else by_fold[:, 0])

    def _exchange_entries(self, sent: Tensor, sizes: list[int]) -> Tensor:
        """Exchange entries between ranks. Collective.

        Args:
            sent: The entries for each rank, concatenated.
            sizes: The number of entries for each rank.

        Returns:
            What each rank has sent to this one, (ranks, n).
        """
        received = sent.new_empty(len(sizes), sizes[self._shard.rank])
        self.bytes_sent += sent.nbytes
        dist.all_to_all_single(received.view(-1), sent, [received.shape[1]] * len(sizes), sizes, group=self._group)
        return received
