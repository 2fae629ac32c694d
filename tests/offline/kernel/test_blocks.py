"""Products of long rows are accurate, blocks fit their memory budget, and sketches have correct error bars."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from scipy.special import stdtrit
from torch import Tensor

from rl_training.offline.kernel.blocks import plan_blocks, row_products, weighted_sum
from rl_training.offline.kernel.sketches import COLUMNS, CountSketches, cosines, inner_products
from rl_training.offline.settings import KernelSettings


def rows(count: int, length: int, seed: int) -> Tensor:
    """Return rows in which a few entries are far above the others, as in gradients in Adam's metric."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(length, generator=generator).mul(1.5).exp()
    return torch.randn(count, length, generator=generator) * scales


def frobenius_error(products: Tensor, a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double().T
    return float((products - exact).norm() / exact.norm())


# --- products ---------------------------------------------------------------------------------------------------------


def test_products_of_long_fp32_rows_are_within_2e_6_where_a_plain_product_is_not() -> None:
    length = 6 * 2**16 + 11
    a, b = rows(5, length, 0) + 1.0, rows(7, length, 1) + 1.0
    products = row_products(a, b)
    assert products.dtype == torch.float64
    assert frobenius_error(products, a, b) < 2e-6


def test_rows_stored_in_bf16_lose_less_than_four_thousandths() -> None:
    a, b = rows(5, 2**17, 0), rows(7, 2**17, 1)
    both_fp32 = a.double() @ b.double().T
    error = float((row_products(a.bfloat16(), b) - both_fp32).norm() / both_fp32.norm())
    assert 1e-5 < error < 4e-3
    assert frobenius_error(row_products(a.bfloat16(), b), a.bfloat16(), b) < 2e-6  # only storing them rounds


def test_weighted_sums_are_in_fp64() -> None:
    a = rows(5, 2**17 + 3, 0)
    weights = torch.linspace(-1, 1, 5)
    assert torch.allclose(weighted_sum(weights, a), weights.double() @ a.double(), rtol=0, atol=1e-12)


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_blocks_fit_the_memory_budget_and_are_balanced() -> None:
    for memory_bytes in (700, 1000, 2000, 10_000):
        blocks = plan_blocks(10, 10, memory_bytes=memory_bytes, microbatch=2)
        assert 4 * 10 * (2 + 2 * len(blocks[0])) <= memory_bytes
        assert [row for block in blocks for row in block] == list(range(10))
        assert len(blocks[0]) - len(blocks[-1]) < len(blocks)
    assert blocks == [range(10)]


def test_each_rank_has_a_block() -> None:
    assert plan_blocks(10, 10, memory_bytes=10_000, microbatch=2, num_ranks=3) == [
        range(0, 4), range(4, 8), range(8, 10)
    ]  # fmt: skip


def test_bf16_doubles_the_rows_of_a_block() -> None:
    sizes = [len(plan_blocks(100, 10, memory_bytes=880, microbatch=2, bytes_per_entry=b)[0]) for b in (4, 2)]
    assert sizes == [10, 20]


def test_a_budget_below_one_row_is_refused_with_a_sufficient_one() -> None:
    with pytest.raises(ValueError, match=r"kernel\.memory_gb=2\.4"):
        plan_blocks(10, 10**8, memory_bytes=1e9, microbatch=4)
    assert len(plan_blocks(10, 10**8, memory_bytes=2.4e9, microbatch=4)) == 10


# --- sketches ---------------------------------------------------------------------------------------------------------

SIZES = {"first": 700, "second": 5, "third": 3000}


def plain_hash(seed: int, name: str, number: int, index: int) -> int:
    """Compute SplitMix64 with Python integers."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{number}/{name}".encode(), digest_size=8).digest(), "little")
    z = (key + index * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def plain_sketch(row: list[float], seed: int, number: int, buckets: int) -> list[float]:
    sketch, start, width = [0.0] * buckets, 0, buckets.bit_length()
    for name, size in SIZES.items():
        for index in range(size):
            bits = plain_hash(seed, name, number // (64 // width), index) >> (width * (number % (64 // width)))
            sketch[bits % buckets] += row[start + index] * (1.0 if bits // buckets % 2 else -1.0)
        start += size
    return sketch


def test_sketches_equal_those_of_plain_integer_arithmetic() -> None:
    row = rows(1, sum(SIZES.values()), 0)
    sketches = CountSketches(SIZES, buckets=64, repeats=10, seed=7)(row)
    for number in (0, 8, 9):  # the first and the last of the nine that share a hash, and the one after
        assert sketches[0, number].tolist() == pytest.approx(plain_sketch(row[0].tolist(), 7, number, 64), abs=1e-3)


def test_sketches_ignore_parameter_order_other_rows_and_column_blocks() -> None:
    sizes = {"a": 3, "b": COLUMNS + 5}
    x = rows(4, sum(sizes.values()), 0)
    whole = CountSketches(sizes)(x)
    reordered = CountSketches(dict(reversed(sizes.items())))(torch.cat([x[:, 3:], x[:, :3]], dim=1))
    assert torch.allclose(whole, reordered, rtol=1e-4, atol=1e-3)
    assert torch.equal(whole[2:3], CountSketches(sizes)(x[2:3]))
    only_tail = torch.zeros_like(x)
    only_tail[:, 3 + COLUMNS :] = x[:, 3 + COLUMNS :]
    head = x - only_tail
    parts = CountSketches(sizes)(only_tail) + CountSketches(sizes)(head)
    assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(whole, CountSketches(sizes, seed=1)(x))


def test_sketch_errors_are_covered_and_fall_as_one_over_the_root_of_the_size() -> None:
    """Over 20 seeds and all pairs of 24 rows: 95 % intervals cover .93 to .97, cosines have error 1/√(S m), no bias."""
    length = sum(SIZES.values())
    x = rows(24, length, 0)
    x[12:] = 0.6 * x[:12] + 0.8 * x[12:]  # so that some cosines are far from 0
    sq_norms = x.double().square().sum(dim=1)
    pair = torch.ones(24, 24).triu(1).bool()
    exact = (x.double() @ x.double().T / (sq_norms[:, None] * sq_norms).sqrt())[pair]
    covered, errors = [], []
    for seed in range(20):
        sketches = CountSketches(SIZES, buckets=128, repeats=8, seed=seed)(x)
        values, stderr = (part[pair] for part in cosines(sketches, sketches, sq_norms, sq_norms))
        errors.append(values - exact)
        covered.append((errors[-1].abs() <= stdtrit(7, 0.975) * stderr).double().mean())
    error = torch.stack(errors)
    assert 0.93 <= float(torch.stack(covered).mean()) <= 0.97
    assert float(error.square().mean().sqrt()) * math.sqrt(8 * 128) == pytest.approx(1.0, abs=0.12)
    assert abs(float(error.mean())) < 4 * float(error.mean(dim=1).std()) / math.sqrt(20)


def test_concatenated_sketches_are_a_sparse_johnson_lindenstrauss_transform() -> None:
    x = rows(3, sum(SIZES.values()), 0)
    sketches = CountSketches(SIZES, repeats=4)(x)
    joined = sketches.flatten(1).double() / 2.0
    products, _ = inner_products(sketches, sketches)
    assert torch.allclose(joined @ joined.T, products)


def test_the_error_of_an_inner_product_from_two_sketches_is_half_their_difference() -> None:
    """Products 3 and 8: their mean is 5.5, their standard deviation 5/√2, and the mean's standard error 5/2."""
    a, b = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [4.0]]])
    value, stderr = inner_products(a, b)
    assert (float(value), float(stderr)) == pytest.approx((5.5, 2.5))


def test_invalid_sketch_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"buckets=500 .* 512"):
        KernelSettings(sketch_buckets=500)
    with pytest.raises(ValueError, match=r"sketch_repeats=1 .*\b2\b"):
        KernelSettings(sketch_repeats=1)
