"""Sums of products over vectors and over spans of them, in a tree or in blocks, so that long ones are exact."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

SEGMENT_SIZE = 2**16  # how many numbers one block of a GPU sums
MIN_BLOCK = 16  # a common divisor of the lengths of spans that is at least this long is used to sum them
NORM_BLOCK = 512  # how many numbers one norm is of
ODD_BLOCK = 64  # otherwise blocks have this length, wherever spans begin and end
DOT_SIZE = 2**18  # the longest vectors whose inner product is one call of BLAS, which sums in fp32


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of a and b over the last dimension, in fp64.

    torch.sum is used because it adds in a tree. A running fp32 sum, such as BLAS's, loses 2 % of a squared norm over
    the 2e8 entries of an embedding, and a matrix product would be rounded to TF32 if that is switched on.

    Args:
        a: (…, n).
        b: (…, n), or (n,) for all vectors of a.

    Returns:
        (…).
    """
    exact = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return (a.to(exact) * b).sum(dim=-1).double()


def square_norm(values: Tensor) -> Tensor:
    """Return the squared norm of a vector, (n,), as a () fp64 tensor.

    The vector is not written again, as squares would be. A single fp32 norm is too small by 1e-5 on a CPU.
    """
    bulk = len(values) // NORM_BLOCK * NORM_BLOCK
    norms = [torch.linalg.vector_norm(values[:bulk].view(-1, NORM_BLOCK), dim=1), values[bulk:].abs()]
    return torch.cat(norms).double().square().sum()


def common_block(sizes: Sequence[int]) -> int:
    """Return the length of the blocks that spans of these sizes are summed in, or 0 if no long one divides them all."""
    block = math.gcd(*sizes) or 1
    return block if block >= MIN_BLOCK or sum(sizes) < MIN_BLOCK * len(sizes) else 0


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two vectors, (n,), as () in their dtype. Unless they are long, no product is written.

    See `dots` on long sums.
    """
    return torch.dot(a, b) if len(a) <= DOT_SIZE else (a * b).sum()


def sums_of_spans(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the sums of consecutive spans of the last dimension, (…, spans) fp64.

    The number of operations does not depend on the number of spans. First, blocks of a length that divides every size
    are summed in the values' own precision, as in `dots`. Then the blocks of each span are summed in fp64. If the sizes
    have no such divisor, as the odd shares of seven processes, entries outside of whole blocks are added one by one.

    Args:
        values: (…, n).
        sizes: The length of each span. They add up to n.

    >>> sums_of_spans(torch.tensor([1.0, 2.0, 3.0, 4.0]), (3, 1))
    tensor([6., 4.], dtype=torch.float64)
    """
    block = common_block(sizes)
    if block:
        blocks = values.unflatten(-1, (-1, block)).sum(dim=-1)
        return sums_of_blocks(blocks, tuple(size // block for size in sizes))
    edges, edge_counts, block_counts = _edges(sizes, values.device)
    num_blocks = values.shape[-1] // ODD_BLOCK
    blocks = values[..., : num_blocks * ODD_BLOCK].unflatten(-1, (-1, ODD_BLOCK)).sum(dim=-1)
    # Whole blocks of spans alternate with blocks that hold the bounds of spans.
    return sums_of_blocks(blocks, block_counts)[..., 1::2] + sums_of_blocks(values[..., edges], edge_counts)


def sums_of_blocks(values: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return the fp64 sums of so many consecutive values each, (…, spans). Long sums are made of parallel segments."""
    if len(counts) == 1:
        return values.double().sum(dim=-1, keepdim=True)
    sums = values.double().flatten()
    for lengths in _segments(counts * math.prod(values.shape[:-1]), values.device):
        sums = torch.segment_reduce(sums, "sum", lengths=lengths, unsafe=True)  # unsafe: skips a check that would wait
    return sums.view(*values.shape[:-1], len(counts))


@functools.lru_cache(maxsize=2**12)
def _segments(counts: tuple[int, ...], device: torch.device) -> Sequence[Tensor]:
    """Return the lengths by which values are summed, level by level. Cached, which saves transfers.

    If every sum fits into a segment, there is one level. Otherwise there are two: the number of values in each segment,
    and the number of segments in each sum.
    """
    segments = [[min(SEGMENT_SIZE, count - start) for start in range(0, count, SEGMENT_SIZE)] for count in counts]
    levels = [counts] if max(counts) <= SEGMENT_SIZE else [[*itertools.chain(*segments)], [*map(len, segments)]]
    lengths = torch.tensor([*itertools.chain(*levels)], dtype=torch.long, device=device)  # one transfer
    return lengths.split([*map(len, levels)])


@functools.lru_cache(maxsize=2**12)
def _edges(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return how spans are cut into whole blocks of ODD_BLOCK and entries outside of them. Cached.

    Returns:
        The indices of the entries, their number in each span, and the numbers of blocks that are in no span and in one,
        alternately.
    """
    indices: list[int] = []
    edge_counts = []
    block_counts = []
    last_block = 0
    for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True):
        first = -(-(stop - size) // ODD_BLOCK)
        last = stop // ODD_BLOCK
        last = max(first, last)
        has_blocks = first < last
        edges = [range(stop - size, first * ODD_BLOCK), range(last * ODD_BLOCK, stop)]
        edges = edges if has_blocks else [range(stop - size, stop)]
        indices += itertools.chain(*edges)
        edge_counts.append(sum(map(len, edges)))
        block_counts += [first - last_block, last - first] if has_blocks else [0, 0]
        last_block = last if has_blocks else last_block
    block_counts.append(sum(sizes) // ODD_BLOCK - last_block)
    return torch.tensor(indices, dtype=torch.long, device=device), tuple(edge_counts), tuple(block_counts)
