"""Sketches: short vectors whose inner products are, in expectation, those of the long vectors they were made of.

A CountSketch of m buckets puts coordinate α with a random sign s(α) into a random bucket b(α):

    a'_k = Σ_{α: b(α) = k} s(α) a_α            E[a'·b'] = a·b,   Var[a'·b'] ≤ (|a|² |b|² + (a·b)²) / m

S independent ones of one vector give S independent answers: their mean, its standard error, and Student's t with S − 1
degrees of freedom. (The buckets of a single sketch do not: each holds other coordinates.) Side by side and divided
by √S they are a sparse Johnson–Lindenstrauss transform of S·m rows with S entries a column: one code for both.

b and s are bits of a hash of a seed, the parameter's name and the coordinate: never stored, and the same on every
machine, process and block of columns, so that sketches made at different times can be multiplied. Several sketches use
different bits of one 64-bit hash.

Source: Charikar, Chen & Farach-Colton 2002, "Finding frequent items in data streams"; Kane & Nelson 2014, "Sparser
Johnson–Lindenstrauss transforms"; the mixing of the hash is SplitMix64's (Steele, Lea & Flood 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.errors import UserError

COLUMNS = 2**16  # hashed at once
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class CountSketches:
    """`repeats` independent CountSketches of `buckets` (a power of two) over parameters of these sizes, by name.

    Example: CountSketches({"w": 1000}, buckets=64, repeats=2)(torch.zeros(3, 1000)).shape == (3, 2, 64)
    """

    def __init__(self, sizes: Mapping[str, int], buckets: int = 512, repeats: int = 8, seed: int = 0) -> None:
        if buckets < 1 or buckets & (buckets - 1):
            raise UserError(f"sketch.buckets={buckets} must be a power of two: use {1 << max(buckets, 1).bit_length()}")
        if repeats < 2:
            raise UserError(f"sketch.repeats={repeats} leaves no error bar: use at least 2, 8 is usual")
        self.sizes, self.buckets, self.repeats, self.seed = dict(sizes), buckets, repeats, seed

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the sketches, (n, repeats, buckets) fp32, of rows, (n, P), in the order of the parameters."""
        # The sign is one more bit of the bucket: it is quickest to sum both signs apart and to subtract once.
        sums = torch.zeros(len(rows), self.repeats, 2 * self.buckets, device=rows.device)
        by_parameter = rows.split(list(self.sizes.values()), dim=1)
        width = self.buckets.bit_length()  # bits of a bucket and its sign
        buckets_per_hash = 64 // width
        for name, columns in zip(self.sizes, by_parameter, strict=True):
            for start in range(0, columns.shape[1], COLUMNS):
                part = columns[:, start : start + COLUMNS].float()
                index = torch.arange(start, start + part.shape[1], device=rows.device)
                for number in range(self.repeats):
                    which, place = divmod(number, buckets_per_hash)
                    if place == 0:
                        hashed = _mixed(index, _key(self.seed, name, which))
                    bucket = (hashed >> (width * place)) & (2 * self.buckets - 1)
                    sums[:, number].index_add_(1, bucket, part)
        return sums[..., self.buckets :] - sums[..., : self.buckets]


def inner_products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the inner products of all pairs and their standard errors, (n, q) fp64 each, from sketches.

    a, b  (n, S, m) and (q, S, m). The error is that of a mean of S: Student's t has S − 1 degrees of freedom.
    """
    each = torch.einsum("nsm,qsm->snq", a.double(), b.double())
    return each.mean(dim=0), each.std(dim=0) / len(each) ** 0.5


def cosines(a: Tensor, b: Tensor, sq_norms_a: Tensor, sq_norms_b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines of all pairs and their standard errors, (n, q) fp64 each; the norms are exact.

    Unbiased, so that an estimate may lie outside of [−1, 1]. Not for a vector with itself: that product is its square
    norm, known exactly. The error is about 1/√(S m).
    """
    products, stderr = inner_products(a, b)
    scale = (sq_norms_a.double().unsqueeze(1) * sq_norms_b.double().unsqueeze(0)).rsqrt()
    return products * scale, stderr * scale


def _key(seed: int, name: str, number: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{number}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mixed(index: Tensor, key: int) -> Tensor:
    """Returns SplitMix64's output for these states, key + golden · index: 64 mixed bits each, as int64."""
    state = index * _signed(_GOLDEN) + _signed(key)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return state ^ _shifted(state, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Returns the bits shifted right and filled with zeros: torch's shift of an int64 repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """Returns the int64 of these 64 bits: torch has no unsigned product, and its int64 wraps around as needed."""
    return bits - (1 << 64) if bits >> 63 else bits
