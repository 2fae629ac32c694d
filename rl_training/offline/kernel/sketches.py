"""Sketches: short vectors whose inner products equal, in expectation, those of the long vectors they stand for.

A CountSketch with m buckets adds coordinate α, with a random sign s(α), to a random bucket b(α):

    a'_k = Σ_{α: b(α) = k} s(α) a_α            E[a'·b'] = a·b,   Var[a'·b'] ≤ (|a|² |b|² + (a·b)²) / m

S independent sketches of a vector give S independent answers: their mean, its standard error, and Student's t with
S − 1 degrees of freedom. (The buckets of one sketch do not, because each holds other coordinates.) Concatenated and
divided by √S, they are a sparse Johnson–Lindenstrauss transform with S·m rows and S entries per column, so this code
serves both.

b and s are bits of a hash of the seed, the parameter's name and the coordinate. They are never stored, and are the same
on every machine, on every rank and for every block of columns, so sketches made at different times can be multiplied.
Several sketches use different bits of one 64-bit hash.

Source: Charikar, Chen & Farach-Colton 2002, "Finding frequent items in data streams"; Kane & Nelson 2014, "Sparser
Johnson–Lindenstrauss transforms"; the mixing of the hash is SplitMix64's (Steele, Lea & Flood 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

COLUMNS = 2**16  # columns to hash at once
# The constants of SplitMix64.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


class CountSketches:
    """Several independent CountSketches of vectors over named parameters. An object holds settings only.

    Example: CountSketches({"w": 1000}, buckets=64, repeats=2)(torch.zeros(3, 1000)).shape == (3, 2, 64)

    Args:
        sizes: The number of entries of each parameter, by name.
        buckets: m, a power of two.
        repeats: S, at least 2.
        seed: Seed of the hash. Only sketches with the same seed can be multiplied.
    """

    def __init__(self, sizes: Mapping[str, int], buckets: int = 512, repeats: int = 8, seed: int = 0) -> None:
        assert buckets.bit_count() == 1, "settings.py refuses other numbers"
        assert repeats >= 2, "settings.py refuses fewer"
        self.sizes = dict(sizes)
        self.buckets = buckets
        self.repeats = repeats
        self.seed = seed

    def __call__(self, rows: Tensor) -> Tensor:
        """Return sketches, (n, repeats, buckets) fp32, of (n, P) rows. Their columns are in the order of `sizes`."""
        # The sign is one more bit of the bucket: summing each sign separately and subtracting once is fastest.
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
    """Estimate the inner products of all pairs of vectors from their sketches.

    Args:
        a: Sketches, (n, S, m).
        b: Sketches, (q, S, m).

    Returns:
        The products and their standard errors, (n, q) fp64 each. The errors are those of a mean of S values: Student's
        t has S − 1 degrees of freedom.
    """
    products = torch.einsum("nsm,qsm->snq", a.double(), b.double())
    return products.mean(dim=0), products.std(dim=0) / len(products) ** 0.5


def cosines(a: Tensor, b: Tensor, sq_norms_a: Tensor, sq_norms_b: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the cosines of all pairs of vectors from their sketches and exact norms.

    The estimates are unbiased, so they may lie outside [−1, 1]. Do not use them for a vector with itself: that product
    is its square norm, which is known exactly.

    Args:
        a: Sketches, (n, S, m).
        b: Sketches, (q, S, m).
        sq_norms_a: Exact square norms of the vectors behind `a`, (n,).
        sq_norms_b: Exact square norms of the vectors behind `b`, (q,).

    Returns:
        The cosines and their standard errors, (n, q) fp64 each. An error is about 1/√(S m).
    """
    products, stderr = inner_products(a, b)
    scale = (sq_norms_a.double().unsqueeze(1) * sq_norms_b.double().unsqueeze(0)).rsqrt()
    return products * scale, stderr * scale


def _key(seed: int, name: str, number: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{number}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mixed(index: Tensor, key: int) -> Tensor:
    """Return SplitMix64's output for the states key + golden · index: 64 mixed bits for each index, as int64."""
    state = index * _signed(_GOLDEN) + _signed(key)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return state ^ _shifted(state, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift bits to the right, filling with zeros: torch's shift of an int64 repeats the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """Return 64 bits as an int64: torch cannot multiply unsigned, but its signed product wraps around as needed."""
    return bits - (1 << 64) if bits >> 63 else bits
