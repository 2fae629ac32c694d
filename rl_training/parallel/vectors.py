"""Vectors over named parameters, in buckets, and their inner products.

A vector is a list of tensors, one for each bucket of its layout. A bucket is one large parameter or several small
neighbours: there may be hundreds of small ones, and starting an operation on one costs more than its work. Several
vectors are the same list with a leading dimension. No tensor is as large as all parameters together, unless the model
is small.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError

JOINED = 2**18  # entries that are handled at once on a CPU: its cache holds them
# On a GPU, starting an operation is the cost, so more entries are handled at once: at least JOINED_ON_GPU, and at least
# one of PARTS_ON_GPU parts of all entries.
JOINED_ON_GPU = 2**23
PARTS_ON_GPU = 6
SEGMENT = 2**16  # numbers that one block of a GPU sums

Vector = list[Tensor]  # by bucket: (n,), or (rows, n)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters that lie in one tensor."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # entries of each parameter
    start: int  # number of its first entry, counted over all parameters

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def bounds(self) -> Iterator[tuple[str, slice]]:
        """Yield each parameter's name and its columns of the bucket."""
        for name, size, end in zip(self.names, self.sizes, itertools.accumulate(self.sizes), strict=True):
            yield name, slice(end - size, end)


class Layout:
    """How vectors over named parameters are divided into buckets.

    >>> layout = Layout({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    >>> [tensor.shape for tensor in layout.zeros(4)]
    [torch.Size([4, 8])]
    """

    def __init__(self, parameters: Mapping[str, Tensor], widths: Mapping[str, int] | None = None) -> None:
        """Divide the parameters into buckets, alike on all processes.

        Args:
            parameters: this process's entries of each parameter.
            widths: the sizes by which neighbours are joined, where processes keep parts of unlike sizes. None: the
                parameters' own.

        Raises:
            UserError: there is no parameter, or they lie on several devices.
        """
        if not parameters:
            raise UserError("there is no trainable parameter to keep gradients of")
        self.names = tuple(parameters)
        devices = {str(param.device): name for name, param in parameters.items()}
        if len(devices) > 1:
            raise UserError(f"trained parameters are on several devices, {devices}: load the model onto one of them")
        first = next(iter(parameters.values()))
        self.device = first.device
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        widths = widths or {name: param.numel() for name, param in parameters.items()}
        # Whole segments, so that the pieces of a parameter that is cut there still share divisors with other lengths.
        on_gpu = max(JOINED_ON_GPU, sum(widths.values()) // PARTS_ON_GPU // SEGMENT * SEGMENT)
        self.chunk_size = JOINED if self.device.type == "cpu" else on_gpu  # entries that are handled at once
        groups: list[list[str]] = []
        size = 0
        for name, width in widths.items():
            if not groups or size + width > self.chunk_size:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += width
        sizes = [tuple(parameters[name].numel() for name in names) for names in groups]
        starts = [0, *itertools.accumulate(map(sum, sizes))]
        self.buckets = tuple(
            Bucket(tuple(names), counts, start) for names, counts, start in zip(groups, sizes, starts, strict=False)
        )
        self.num_entries = starts[-1]

    @property
    def num_bytes(self) -> int:
        """The bytes of one vector."""
        return self.num_entries * self.dtype.itemsize

    @property
    def is_small(self) -> bool:
        """Whether all entries together are few enough to be handled at once."""
        return self.num_entries <= self.chunk_size

    def vector(self, tensors: Iterable[Tensor]) -> Vector:
        """Return the vector of these tensors, which are in the parameters' order. Large tensors are not copied."""
        parts = iter(tensors)
        return [
            join([next(parts).detach().reshape(-1).to(self.dtype) for _ in bucket.names]) for bucket in self.buckets
        ]

    def zeros(
        self, *leading: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Vector:
        """Return a vector of zeros, or several: (*leading, n) per bucket."""
        kind: Any = {"dtype": dtype or self.dtype, "device": device or self.device}
        return [torch.zeros(*leading, bucket.size, **kind) for bucket in self.buckets]

    def by_name(self, vector: Vector) -> dict[str, Tensor]:
        """Return views of each parameter's entries, (…, n), of a vector or of several, by name."""
        return {
            name: part[..., columns]
            for bucket, part in zip(self.buckets, vector, strict=True)
            for name, columns in bucket.bounds()
        }

    def split(self, flat: Tensor) -> Vector:
        """Return views of the buckets of flat vectors, (…, P), in which the parameters follow one another."""
        return list(flat.split([bucket.size for bucket in self.buckets], dim=-1))


def num_bytes(vector: Vector | None) -> int:
    """Return the bytes that a vector takes, 0 for None."""
    return sum(part.numel() * part.element_size() for part in vector or ())


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of a and b over the last dimension, in fp64.

    torch.sum adds in a tree. A running fp32 sum, such as BLAS's, loses 2 % of a square norm over the 2e8 entries of an
    embedding, and a product of matrices would be rounded to TF32 where that is switched on.

    Args:
        a: (…, n).
        b: (…, n), or (n,) for all rows of a.

    Returns:
        (…).
    """
    return _products(a, b).double()


def _products(a: Tensor, b: Tensor) -> Tensor:
    exact = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return (a.to(exact) * b).sum(dim=-1)


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner products of vectors, or of several, (…) fp64, on the device of `b`."""
    return torch.stack([_products(x.to(y.device), y) for x, y in zip(a, b, strict=True)]).double().sum(dim=0)


def sums_of_spans(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Sum each of the spans that follow one another in (n,) values. Return (spans,) fp64.

    It takes a few operations, however many spans there are. Blocks of a length that divides every size are summed in
    the values' own precision, as in `dots`; each span's blocks are then summed in fp64, in segments where the span is
    long, which a GPU sums in parallel.

    Args:
        values: (n,).
        sizes: the length of each span; they add up to n.

    >>> sums_of_spans(torch.tensor([1.0, 2.0, 3.0, 4.0]), (3, 1))
    tensor([6., 4.], dtype=torch.float64)
    """
    block = math.gcd(*sizes) or 1
    sums = values.view(-1, block).sum(dim=1).double()
    for lengths in _segments(sizes, block, values.device):
        sums = torch.segment_reduce(sums, "sum", lengths=lengths, unsafe=True)  # unsafe: no wait for a check
    return sums


def square_norms(layout: Layout, rows: Vector, sqrt_preconditioner: Sequence[Tensor | float] | None) -> Tensor:
    """Return |g|² and Σ P g² by row and parameter.

    A row of a bucket is handled at a time, so the number of operations does not grow with the number of parameters.

    Args:
        layout: of the rows.
        rows: (rows, n) per bucket.
        sqrt_preconditioner: √P, (n,) per bucket; None: Σ P g² is nan.

    Returns:
        (rows, parameters, 2) fp64.
    """
    by_bucket = []
    metric = sqrt_preconditioner or [math.nan] * len(rows)
    for bucket, part, root in zip(layout.buckets, rows, metric, strict=True):
        exact_rows = (row.to(layout.device, layout.dtype) for row in part)
        sums = [sums_of_spans(g.square(), bucket.sizes) for row in exact_rows for g in (row, row * root)]
        by_bucket.append(torch.stack(sums).view(len(part), 2, -1))
    return torch.cat(by_bucket, dim=2).transpose(1, 2)


@functools.lru_cache(maxsize=2**12)
def _segments(sizes: tuple[int, ...], block: int, device: torch.device) -> Sequence[Tensor]:
    """Return the lengths by which `sums_of_spans` reduces its blocks, level by level. Cached, with its transfer.

    Where every span fits into a segment there is one level, the blocks of each span. Otherwise there are two: the
    blocks of each segment, and the segments of each span.
    """
    counts = [size // block for size in sizes]
    cut = [[min(SEGMENT, count - at) for at in range(0, count, SEGMENT)] for count in counts]
    levels = [counts] if max(counts) <= SEGMENT else [[*itertools.chain(*cut)], [*map(len, cut)]]
    numbers = torch.tensor([*itertools.chain(*levels)], dtype=torch.long, device=device)  # one transfer
    return numbers.split([*map(len, levels)])


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a () tensor to be expanded. Cached."""
    return torch.full((), value, dtype=dtype, device=device)


def add(target: Vector, vector: Vector, factor: float = 1.0) -> None:
    """Add a multiple of `vector` to `target` in place."""
    for part, summand in zip(target, vector, strict=True):
        part.add_(summand.to(part.device), alpha=factor)


def copy(target: Vector, vector: Vector) -> None:
    """Copy `vector`, or several, into `target`."""
    for part, source in zip(target, vector, strict=True):
        part.copy_(source)


def rows_of(rows: Vector, numbers: range) -> Vector:
    """Return some neighbouring rows of (F, n) per bucket: views."""
    return [part[numbers.start : numbers.stop] for part in rows]


def join(vectors: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors into one, (n,). A single one is not copied."""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))
