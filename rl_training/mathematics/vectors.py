"""Vectors over named parameters, in buckets, and their inner products.

A vector is a list of tensors, one for each bucket of its layout. A bucket is one large parameter, or several small
neighbours joined, because there may be hundreds of these, and an operation costs more than its work. Several vectors
are the same list with a leading dimension. No tensor is as large as all parameters together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2**20  # entries whose products are summed in fp32; beyond that, in fp64
JOINED = 2**18  # entries of small parameters that are handled together
SHARD = "shard."  # how names of tensors in a checkpoint begin that hold one process's entries
SLICE = 2**22  # entries of a large parameter that are handled at once, where a step is calculated for several folds

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
        """Yields the name and the columns of each parameter in the bucket."""
        for name, size, end in zip(self.names, self.sizes, itertools.accumulate(self.sizes), strict=True):
            yield name, slice(end - size, end)


class Layout:
    """How vectors over these parameters lie in buckets. ValueError when there is no parameter.

    >>> layout = Layout({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    >>> [tensor.shape for tensor in layout.zeros(4)]
    [torch.Size([4, 8])]
    """

    def __init__(self, parameters: Mapping[str, Tensor], widths: Mapping[str, int] | None = None) -> None:
        """widths: entries by which neighbours are joined, where processes keep parts of unlike sizes; None: these."""
        if not parameters:
            raise ValueError("there is no trainable parameter to keep gradients of")
        self.names = tuple(parameters)
        first = next(iter(parameters.values()))
        self.device = first.device
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        groups: list[list[str]] = []
        size = 0
        for name, param in parameters.items():
            width = param.numel() if widths is None else widths[name]
            if not groups or size + width > JOINED:
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

    def vector(self, tensors: Iterable[Tensor]) -> Vector:
        """Returns one vector, given by its tensors in the order of the parameters; a large one is not copied."""
        parts = iter(tensors)
        return [
            join([next(parts).detach().reshape(-1).to(self.dtype) for _ in bucket.names]) for bucket in self.buckets
        ]

    def zeros(self, *leading: int, device: torch.device | str | None = None, pinned: bool = False) -> Vector:
        """Returns a vector of zeros, or several: (*leading, n) of each bucket."""
        where = device or self.device
        return [
            torch.zeros(*leading, bucket.size, dtype=self.dtype, device=where, pin_memory=pinned)
            for bucket in self.buckets
        ]

    def by_name(self, vector: Vector) -> dict[str, Tensor]:
        """Returns the parameters' entries of a vector, or of several: (…, n) views, by name."""
        return {
            name: part[..., columns]
            for bucket, part in zip(self.buckets, vector, strict=True)
            for name, columns in bucket.bounds()
        }

    def split(self, flat: Tensor) -> Vector:
        """Returns the buckets of flat vectors, (…, P), whose parameters follow one another: views."""
        return list(flat.split([bucket.size for bucket in self.buckets], dim=-1))


def num_bytes(vector: Vector | None) -> int:
    """Returns the bytes of a vector, 0 of none."""
    return sum(part.numel() * part.element_size() for part in vector or ())


def dot(one: Vector, other: Vector) -> Tensor:
    """Returns the inner product of two vectors, a scalar fp64, on the device of the second."""
    return torch.stack([flat_dot(a.to(b.device), b).double() for a, b in zip(one, other, strict=True)]).sum()


def add(target: Vector, vector: Vector, factor: float = 1.0) -> None:
    """Adds a multiple of a vector to another one, in place."""
    for part, other in zip(target, vector, strict=True):
        part.add_(other.to(part.device), alpha=factor)


def copy(target: Vector, vector: Vector) -> None:
    """Copies a vector, or several, into another one, in place."""
    for part, other in zip(target, vector, strict=True):
        part.copy_(other)


def as_flat(tensor: Tensor) -> Tensor:
    """Returns the entries as a vector, in at least fp32."""
    flat = tensor.detach().reshape(-1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def flat_dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the inner product of two vectors, a scalar; in fp64 where there are more than CHUNK entries.

    An fp32 sum over the 2e8 entries of an embedding loses 2 % of a square norm; within a chunk, 1e-5.
    """
    if len(a) <= CHUNK:
        return torch.dot(a, b)
    return torch.stack([torch.dot(*parts) for parts in zip(a.split(CHUNK), b.split(CHUNK), strict=True)]).double().sum()


def rows_dot(rows: Tensor, vector: Tensor) -> Tensor:
    """Returns the inner products of rows, (…, n), with a vector, (n,), as (…) fp64; within CHUNK columns in theirs.

    Matrix times vector: a product of matrices would be rounded to TF32 where that is switched on.
    """
    pairs = zip(rows.split(CHUNK, dim=-1), vector.split(CHUNK), strict=True)
    return torch.stack([(row_part @ part).double() for row_part, part in pairs]).sum(dim=0)


def pairs_dot(rows: Tensor, others: Tensor) -> Tensor:
    """Returns the inner product of each row with its own partner, (rows,) fp64; within CHUNK columns in theirs."""
    pairs = zip(rows.split(CHUNK, dim=-1), others.split(CHUNK, dim=-1), strict=True)
    return torch.stack([(one * other).sum(dim=-1).double() for one, other in pairs]).sum(dim=0)


def join(vectors: Sequence[Tensor]) -> Tensor:
    """Returns the vectors as one, (n,); a single one is not copied."""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))
