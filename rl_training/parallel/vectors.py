"""Vectors over named parameters, in buckets, and their inner products.

A vector is a list of tensors, one for each bucket of its layout. A bucket is one large parameter, or several small
neighbours: models have hundreds of small parameters, and launching an operation on one costs more than running it.
Several vectors are the same list with a leading dimension. Unless the model is small, no tensor is as large as all
parameters together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.parallel.fusion import Fusion
from rl_training.parallel.sums import SEGMENT_SIZE, dots, sums_of_spans

CHUNK_SIZE_CPU = 2**18  # how many entries to handle at once on a CPU, whose cache holds that many
# On a GPU the cost is in launching an operation, so more entries are handled at once: at least MIN_CHUNK_SIZE_GPU, or
# about 1/TARGET_CHUNKS_GPU of all entries if that is more.
MIN_CHUNK_SIZE_GPU = 2**23
TARGET_CHUNKS_GPU = 24
LARGE = 2**25  # vectors of at least this many entries are large, which changes what is kept of them and how
MAX_SAMPLED = 2**18  # about so many entries of a step are compared on each rank

Vector = list[Tensor]  # one tensor per bucket: (n,), or (vectors, n)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters that share one tensor."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # number of entries of each parameter

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def bounds(self) -> Iterator[tuple[str, slice]]:
        """Yield each parameter's name and its columns in the bucket."""
        for name, size, end in zip(self.names, self.sizes, itertools.accumulate(self.sizes), strict=True):
            yield name, slice(end - size, end)


@dataclass(frozen=True, eq=False)
class Layout:
    """How vectors over named parameters are divided into buckets, identically on all ranks, and what multiplies them.

    >>> layout = Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    >>> [tensor.shape for tensor in layout.zeros(4)]
    [torch.Size([4, 8])]
    """

    buckets: tuple[Bucket, ...]
    device: torch.device
    dtype: torch.dtype  # at least fp32
    chunk_size: int  # how many entries to handle at once
    fusion: Fusion = field(default_factory=Fusion)  # runs functions of these vectors

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], grouping_sizes: Mapping[str, int] | None = None) -> Layout:
        """Return the layout of vectors over these parameters, whose functions run uncompiled.

        Args:
            parameters: This rank's entries of each parameter.
            grouping_sizes: The sizes that decide which neighbours are joined, if ranks keep parts of different sizes.
                None: the parameters' own sizes.

        Raises:
            UserError: There is no parameter, or the parameters are on several devices.
        """
        if not parameters:
            raise UserError("there is no trainable parameter to keep gradients of")
        devices = {str(param.device): name for name, param in parameters.items()}
        if len(devices) > 1:
            raise UserError(f"trained parameters are on several devices, {devices}: load the model onto one of them")
        first = next(iter(parameters.values()))
        grouping_sizes = grouping_sizes or {name: param.numel() for name, param in parameters.items()}
        chunk_size = _chunk_size(sum(grouping_sizes.values()), first.device)
        groups: list[list[str]] = []
        size = 0
        for name, grouping_size in grouping_sizes.items():
            if not groups or size + grouping_size > chunk_size:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += grouping_size
        buckets = (Bucket(tuple(names), tuple(parameters[name].numel() for name in names)) for names in groups)
        return cls(tuple(buckets), first.device, torch.promote_types(first.dtype, torch.float32), chunk_size)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters, in order."""
        return tuple(name for bucket in self.buckets for name in bucket.names)

    @functools.cached_property
    def num_entries(self) -> int:
        """The number of entries of one vector."""
        return sum(bucket.size for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        """The size of one vector in bytes."""
        return self.num_entries * self.dtype.itemsize

    @property
    def is_small(self) -> bool:
        """Whether all entries together are few enough to be handled at once."""
        return self.num_entries <= self.chunk_size

    @property
    def is_large(self) -> bool:
        """Whether memory matters more than time: by default fold vectors are in 8 bits then, and δθ is not held."""
        return self.num_entries >= LARGE

    @property
    def stride(self) -> int:
        """Every `stride`-th entry of each parameter is sampled, beginning with its first."""
        return max(1, math.ceil(self.num_entries / MAX_SAMPLED))

    @functools.cached_property
    def sampled_columns(self) -> list[Tensor]:
        """The columns of each bucket that are sampled, in host memory."""
        return [
            torch.cat([torch.arange(columns.start, columns.stop, self.stride) for _, columns in bucket.bounds()])
            for bucket in self.buckets
        ]

    def sampled_within(self, bucket: int, first: int, size: int) -> tuple[slice, Tensor | slice]:
        """Return which of a bucket's samples are among its columns from `first` on, and their columns there. Cached."""
        if self.stride == 1:
            return slice(first, first + size), slice(None)
        key = bucket, first, size
        if key not in self._sampled_within:
            columns = self.sampled_columns[bucket]
            samples = slice(*torch.searchsorted(columns, torch.tensor([first, first + size])).tolist())
            self._sampled_within[key] = samples, (columns[samples] - first).to(self.device)
        return self._sampled_within[key]

    @functools.cached_property
    def _sampled_within(self) -> dict[tuple[int, int, int], tuple[slice, Tensor]]:
        """What `sampled_within` has returned so far."""
        return {}

    def vector(self, tensors: Iterable[Tensor]) -> Vector:
        """Return the vector of these tensors, given in the parameters' order. Large tensors are not copied."""
        parts = iter(tensors)
        return [
            join([next(parts).detach().reshape(-1).to(self.dtype) for _ in bucket.names]) for bucket in self.buckets
        ]

    def zeros(
        self, *leading: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Vector:
        """Return a vector of zeros, or several: (*leading, n) per bucket."""
        options: Any = {"dtype": dtype or self.dtype, "device": device or self.device}
        return [torch.zeros(*leading, bucket.size, **options) for bucket in self.buckets]

    def by_name(self, vector: Vector) -> dict[str, Tensor]:
        """Return views of each parameter's entries by name, (…, n), of one or several vectors."""
        return {
            name: part[..., columns]
            for bucket, part in zip(self.buckets, vector, strict=True)
            for name, columns in bucket.bounds()
        }

    def split(self, flat: Tensor) -> Vector:
        """Return the buckets as views of flat vectors, (…, P), which hold the parameters one after another."""
        return list(flat.split([bucket.size for bucket in self.buckets], dim=-1))


def _chunk_size(num_entries: int, device: torch.device) -> int:
    """Return how many entries of vectors to handle at once on this device."""
    if device.type == "cpu":
        return CHUNK_SIZE_CPU
    # Whole segments: if a parameter is cut there, its pieces still share divisors with other lengths.
    return max(MIN_CHUNK_SIZE_GPU, num_entries // TARGET_CHUNKS_GPU // SEGMENT_SIZE * SEGMENT_SIZE)


def sample_entries(layout: Layout, entries: Iterable[Tensor]) -> Tensor:
    """Return the sampled entries of each parameter, given all of them, (n,) each, copied to fp64."""
    return torch.cat([values[:: layout.stride] for values in entries]).to(layout.device, torch.float64)


def num_bytes(vector: Vector | None) -> int:
    """Return the size of a vector in bytes; 0 for None."""
    return sum(part.numel() * part.element_size() for part in vector or ())


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner products of one or several vectors, (…) fp64, on the device of `b`."""
    return torch.stack([dots(x.to(y.device), y) for x, y in zip(a, b, strict=True)]).sum(dim=0)


def square_norms(layout: Layout, vectors: Vector, sqrt_preconditioner: Sequence[Tensor | float] | None) -> Tensor:
    """Return |g|² and Σ P g² by vector and parameter.

    Buckets are handled whole, so the number of operations does not grow with the number of parameters.

    Args:
        layout: The layout of the vectors.
        vectors: The vectors g, (vectors, n) per bucket.
        sqrt_preconditioner: √P, (n,) per bucket. None: Σ P g² is nan.

    Returns:
        (vectors, parameters, 2) fp64.
    """
    by_bucket = []
    metric = sqrt_preconditioner or [math.nan] * len(vectors)
    for bucket, part, root in zip(layout.buckets, vectors, metric, strict=True):
        exact = (values.to(layout.device, layout.dtype) for values in part)
        sums = [sums_of_spans(g.square(), bucket.sizes) for values in exact for g in (values, values * root)]
        by_bucket.append(torch.stack(sums).view(len(part), 2, -1))
    return torch.cat(by_bucket, dim=2).transpose(1, 2)


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a () tensor, for expanding. Cached."""
    return torch.full((), value, dtype=dtype, device=device)


def join(vectors: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors into one, (n,). A single vector is not copied."""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))
