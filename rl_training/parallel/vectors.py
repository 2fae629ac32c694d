"""Vectors over named parameters, in buckets, and their inner products.

A vector is a list of tensors, one for each bucket of its layout. A bucket is one large parameter, or several small
neighbours joined, because there may be hundreds of these, and an operation costs more than its work. Several vectors
are the same list with a leading dimension. No tensor is as large as all parameters together, unless these are few.
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

JOINED = 2**18  # entries that are handled at once on a CPU, which has them in its cache
# On a GPU, where an operation's start is the cost: at least these, or one of so many parts of all entries.
JOINED_ON_GPU, PARTS_ON_GPU = 2**23, 6
SEGMENT = 2**16  # numbers that one block of a GPU sums
SHARD = "shard."  # how names of tensors in a checkpoint begin that hold one process's entries

Vector = list[Tensor]  # by bucket: (n,), or (rows, n)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters that lie in one tensor."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    start: int  # of its first entry, counted over all parameters

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def bounds(self) -> Iterator[tuple[str, slice]]:
        """Yield the name and the columns of each parameter in the bucket."""
        for name, size, end in zip(self.names, self.sizes, itertools.accumulate(self.sizes), strict=True):
            yield name, slice(end - size, end)


class Layout:
    """How vectors over these parameters lie in buckets. ValueError when there is none, or on several devices.

    >>> layout = Layout({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    >>> [tensor.shape for tensor in layout.zeros(4)]
    [torch.Size([4, 8])]
    """

    def __init__(self, parameters: Mapping[str, Tensor], widths: Mapping[str, int] | None = None) -> None:
        """widths: entries by which neighbours are joined, where processes keep parts of unlike sizes; None: these."""
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
        # In whole segments: a parameter that is cut there still has a length that other lengths share divisors with.
        on_gpu = max(JOINED_ON_GPU, sum(widths.values()) // PARTS_ON_GPU // SEGMENT * SEGMENT)
        self.chunk_size = JOINED if self.device.type == "cpu" else on_gpu  # entries that are handled together
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
        """Bytes of one vector."""
        return self.num_entries * self.dtype.itemsize

    @property
    def is_small(self) -> bool:
        """Whether all entries together are few enough to be handled at once."""
        return self.num_entries <= self.chunk_size

    def vector(self, tensors: Iterable[Tensor]) -> Vector:
        """Return one vector, given by its tensors in the order of the parameters; a large one is not copied."""
        parts = iter(tensors)
        return [
            join([next(parts).detach().reshape(-1).to(self.dtype) for _ in bucket.names]) for bucket in self.buckets
        ]

    def zeros(
        self, *leading: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Vector:
        """Return a vector of zeros, or several: (*leading, n) of each bucket."""
        kind: Any = {"dtype": dtype or self.dtype, "device": device or self.device}
        return [torch.zeros(*leading, bucket.size, **kind) for bucket in self.buckets]

    def by_name(self, vector: Vector) -> dict[str, Tensor]:
        """Return the parameters' entries of a vector, or of several: (…, n) views, by name."""
        return {
            name: part[..., columns]
            for bucket, part in zip(self.buckets, vector, strict=True)
            for name, columns in bucket.bounds()
        }

    def split(self, flat: Tensor) -> Vector:
        """Return the buckets of flat vectors, (…, P), whose parameters follow one another: views."""
        return list(flat.split([bucket.size for bucket in self.buckets], dim=-1))


def num_bytes(vector: Vector | None) -> int:
    """Return the bytes of a vector, 0 of none."""
    return sum(part.numel() * part.element_size() for part in vector or ())


def dots(rows: Tensor, others: Tensor) -> Tensor:
    """Return the inner products over the last dimension, (…) fp64, of (…, n) and (…, n), of which one may be (n,).

    torch.sum adds in a tree: a running fp32 sum, as of BLAS, loses 2 % of a square norm over the 2e8 entries of an
    embedding. Not a product of matrices, which would be rounded to TF32 where that is switched on.
    """
    return _products(rows, others).double()


def _products(rows: Tensor, others: Tensor) -> Tensor:
    exact = torch.promote_types(torch.promote_types(rows.dtype, others.dtype), torch.float32)
    return (rows.to(exact) * others).sum(dim=-1)


def dot(one: Vector, other: Vector) -> Tensor:
    """Return the inner products of vectors, or of several, (…) fp64, on the device of the second."""
    return torch.stack([_products(a.to(b.device), b) for a, b in zip(one, other, strict=True)]).double().sum(dim=0)


def sums_of_spans(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the sums of (n,) values that lie one after another, so many in each, (spans,) fp64.

    A few operations, however many spans: first sums of blocks of a length that divides every size, in the values' own
    precision as in `dots`; then of each span's blocks in fp64, of long spans in segments, which a GPU sums in parallel.

    >>> sums_of_spans(torch.tensor([1.0, 2.0, 3.0, 4.0]), (3, 1))
    tensor([6., 4.], dtype=torch.float64)
    """
    block = math.gcd(*sizes) or 1
    sums = values.view(-1, block).sum(dim=1).double()
    for lengths in _segments(sizes, block, values.device):
        sums = torch.segment_reduce(sums, "sum", lengths=lengths, unsafe=True)  # unsafe: no wait for a check
    return sums


def square_norms(layout: Layout, rows: Vector, roots: Sequence[Tensor | float] | None) -> Tensor:
    """Return |g|² and Σ P g² by row and parameter, (rows, parameters, 2) fp64; the second is nan without roots, √P.

    A row of a bucket at a time: operations do not grow with the number of parameters.
    """
    found = []
    for bucket, part, root in zip(layout.buckets, rows, roots or [math.nan] * len(rows), strict=True):
        own = (row.to(layout.device, layout.dtype) for row in part)
        sums = [sums_of_spans(some.square(), bucket.sizes) for row in own for some in (row, row * root)]
        found.append(torch.stack(sums).view(len(part), 2, -1))
    return torch.cat(found, dim=2).transpose(1, 2)


@functools.lru_cache(maxsize=2**12)
def _segments(sizes: tuple[int, ...], block: int, device: torch.device) -> Sequence[Tensor]:
    """Return how many blocks each segment has, where some span has several, and how many parts each span has; kept."""
    counts = [size // block for size in sizes]
    cut = [[min(SEGMENT, count - at) for at in range(0, count, SEGMENT)] for count in counts]
    levels = [counts] if max(counts) <= SEGMENT else [[*itertools.chain(*cut)], [*map(len, cut)]]
    numbers = torch.tensor([*itertools.chain(*levels)], dtype=torch.long, device=device)  # one transfer
    return numbers.split([*map(len, levels)])


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor, (): kept, to be expanded."""
    return torch.full((), value, dtype=dtype, device=device)


def add(target: Vector, vector: Vector, factor: float = 1.0) -> None:
    """Add a multiple of a vector to another one, in place."""
    for part, other in zip(target, vector, strict=True):
        part.add_(other.to(part.device), alpha=factor)


def copy(target: Vector, vector: Vector) -> None:
    """Copy a vector, or several, into another one, in place."""
    for part, other in zip(target, vector, strict=True):
        part.copy_(other)


def join(vectors: Sequence[Tensor]) -> Tensor:
    """Return the vectors as one, (n,); a single one is not copied."""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))
