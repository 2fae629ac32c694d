"""A vector for each fold, exact or in 8 bits with a scale for each block of entries.

Vectors are filled bucket by bucket, as gradients arrive. What arrives first is written, and what follows is added, so
they need not be zeros before.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_training.parallel import fusion
from rl_training.parallel.vectors import Layout, Vector, num_bytes

BLOCK = 128  # entries that share a scale in 8 bits
LEVELS = 127  # of a number in 8 bits, on each side of 0


class Receiver(NamedTuple):
    """What takes the gradients of some folds, bucket by bucket."""

    num_folds: int
    take: Callable[[int, int, Tensor], None]  # (index of the bucket, first column, (folds, n)); may keep no reference


class EncodedVector(NamedTuple):
    """A vector's entries in 8 bits, as a compiled function takes them."""

    levels: Tensor  # (n,) int8
    scales: Tensor  # (n / fusion.BLOCK, 1)


def entries_of(vector: Tensor | EncodedVector) -> Tensor:
    """Return a vector's entries. Those in 8 bits must be in blocks."""
    return vector if isinstance(vector, Tensor) else vector.levels * vector.scales


def adding_to(vector: Vector) -> Receiver:
    """Return the receiver that adds to (folds, n) per bucket."""

    def take(bucket: int, first: int, values: Tensor) -> None:
        target = vector[bucket][:, first : first + values.shape[1]]
        target.add_(values.to(target.device))

    return Receiver(len(vector[0]), take)


def handing_to(receivers: Sequence[Receiver], num_folds: int) -> Receiver:
    """Return the receiver that hands what it takes to each of these."""

    def take(bucket: int, first: int, values: Tensor) -> None:
        for receiver in receivers:
            receiver.take(bucket, first, values)

    return Receiver(num_folds, take)


def fold_dtype(layout: Layout, asked: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype in which vectors by fold are kept.

    The layout's for float32; for None 8 bits if vectors are large, otherwise the layout's.
    """
    if asked is None:
        return torch.int8 if layout.is_large else layout.dtype
    return layout.dtype if asked == torch.float32 else asked


def equivalent_vectors(layout: Layout, num_folds: int, asked: torch.dtype | None = None) -> float:
    """Return how many exact vectors take as much memory as a vector for each fold: in 8 bits about a quarter."""
    dtype = fold_dtype(layout, asked)
    scales = 1.0 / BLOCK if dtype == torch.int8 else 0.0
    return num_folds * (dtype.itemsize / layout.dtype.itemsize + scales)


class FoldVectors:
    """The vectors of a step's folds: this rank's entries, as sums over backwards.

    Args:
        layout: The layout of each vector.
        count: K, the number of folds.
        dtype: Dtype of the entries. None for the layout's. torch.int8: `LEVELS` times an entry divided by the largest
            of its block, rounded to nearest.
        device: Where they are kept. None for the layout's device.
    """

    def __init__(
        self, layout: Layout, count: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        self.layout = layout
        self._sizes = [bucket.size for bucket in layout.buckets]
        self.dtype = dtype or layout.dtype
        self.factors = torch.ones(count, dtype=torch.float64)  # multiplied with a fold's vector they give its mean
        device = device or layout.device
        self._scales: Vector = []  # (K, blocks) per bucket, in 8 bits
        widths = self._sizes
        if self.dtype == torch.int8:
            blocks = [-(-size // BLOCK) for size in widths]
            widths = [BLOCK * number for number in blocks]
            self._scales = [torch.empty(count, number, dtype=layout.dtype, device=device) for number in blocks]
        self._parts: Vector = [torch.empty(count, width, dtype=self.dtype, device=device) for width in widths]
        self._num_written = Counter[tuple[int, int, int]]()  # how often, by (fold, bucket, first column)

    def __len__(self) -> int:
        return len(self.factors)

    @property
    def num_bytes(self) -> int:
        """The size of all vectors in bytes."""
        return num_bytes(self._parts) + num_bytes(self._scales)

    @property
    def rounding(self) -> float:
        """A generous bound on the distance that rounding moves a vector, relative to its norm."""
        if self.dtype == torch.int8:
            return 0.05
        return 0.0 if self.dtype == self.layout.dtype else torch.finfo(self.dtype).eps

    def receiver(self, folds: range) -> Receiver:
        """Return the receiver that adds to the vectors of these folds."""
        return Receiver(len(folds), functools.partial(self._take, folds))

    def replace(self, folds: range, vectors: Vector) -> None:
        """Write vectors, (folds, n) per bucket, over those of these folds."""
        for key in [key for key in self._num_written if key[0] in folds]:
            del self._num_written[key]
        for bucket, values in enumerate(vectors):
            self._take(folds, bucket, 0, values)

    def complete(self) -> None:
        """Write zeros where nothing has arrived."""
        arrived = {(fold, bucket) for fold, bucket, _ in self._num_written}
        for bucket, part in enumerate(self._parts):
            for tensor in (part, *self._scales[bucket : bucket + 1]):
                for fold in range(len(self)):
                    if (fold, bucket) not in arrived:
                        tensor[fold].zero_()

    def of(self, bucket: int, columns: slice, folds: int | slice = slice(None)) -> Tensor:
        """Return entries as they are stored, in the layout's dtype on its device.

        Args:
            bucket: The index of the bucket.
            columns: Which columns of it.
            folds: One fold, for (n,), or several, for (folds, n).
        """
        part = self._parts[bucket]
        if self.dtype != torch.int8:
            return part[folds, columns].to(self.layout.device, self.layout.dtype)
        first = columns.start // BLOCK
        last = -(-columns.stop // BLOCK)
        scales = self._scales[bucket][folds, first:last].to(self.layout.device)
        blocks = part[folds, first * BLOCK : last * BLOCK].to(self.layout.device).unflatten(-1, (-1, BLOCK))
        entries = (blocks * scales.unsqueeze(-1)).flatten(-2)
        return entries[..., columns.start - first * BLOCK : columns.stop - first * BLOCK]

    def encoded(self, bucket: int, columns: slice, fold: int) -> Tensor | EncodedVector:
        """Return a fold's entries as they are stored, for compiled functions.

        Where `columns` cut a block, return what `of` returns.
        """
        if self.dtype != torch.int8 or columns.start % BLOCK or columns.stop % BLOCK:
            return self.of(bucket, columns, fold)
        scales = self._scales[bucket][fold, columns.start // BLOCK : columns.stop // BLOCK].to(self.layout.device)
        levels = self._parts[bucket][fold, columns].to(self.layout.device)
        return EncodedVector(levels, scales.repeat_interleave(BLOCK // fusion.BLOCK).unsqueeze(1))

    def of_folds(self, folds: range) -> Vector:
        """Return the vectors of these folds as they are stored, (folds, n) per bucket."""
        chosen = slice(folds.start, folds.stop)
        return [self.of(bucket, slice(0, size), chosen) for bucket, size in enumerate(self._sizes)]

    def sum(self, weights: Tensor) -> Vector:
        """Return the sum of all folds' means with weights, (K,), on the layout's device."""
        total = self.layout.zeros()
        for bucket, part in enumerate(total):
            for fold, weight in enumerate((weights * self.factors).tolist()):
                part.add_(self.of(bucket, slice(0, len(part)), fold), alpha=weight)
        return total

    def means(self, folds: range | None = None) -> Vector:
        """Return the mean gradients of these folds, by default of all, (folds, n) per bucket."""
        folds = range(len(self)) if folds is None else folds
        factors = self.factors[folds.start : folds.stop].to(self.layout.device, self.layout.dtype)
        return [factors.unsqueeze(1) * part for part in self.of_folds(folds)]

    def _take(self, folds: range, bucket: int, first: int, values: Tensor) -> None:
        """Write or add (folds, n)."""
        is_first = not self._num_written[folds.start, bucket, first]
        self._num_written.update((fold, bucket, first) for fold in folds)
        chosen = slice(folds.start, folds.stop)
        columns = slice(first, first + values.shape[1])
        if self.dtype != torch.int8:
            target = self._parts[bucket][chosen, columns]
            target.copy_(values) if is_first else target.add_(values.to(target.device))
            return
        assert is_first, "in 8 bits, what arrives in several backwards is summed before"
        assert first % BLOCK == 0, "a chunk of a bucket is made of whole blocks"
        values = values.to(self.layout.dtype)
        padded = nn.functional.pad(values, (0, -values.shape[1] % BLOCK)) if values.shape[1] % BLOCK else values
        stop = first + padded.shape[1]
        for fold, entries in zip(folds, padded, strict=True):
            encoded = self.layout.fusion.entries(_encode, BLOCK, len(entries), entries)
            levels, scales = _encode(entries.view(-1, BLOCK)) if encoded is None else encoded
            self._parts[bucket][fold, first:stop] = levels.view(-1)
            self._scales[bucket][fold, first // BLOCK : stop // BLOCK] = scales.view(-1)


def _encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries in 8 bits and the scale of each block."""
    scales = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=1, keepdim=True).div_(LEVELS)
    levels = (blocks / scales).round_().nan_to_num_(0.0)  # a block of zeros has the scale 0
    return levels.to(torch.int8), scales
