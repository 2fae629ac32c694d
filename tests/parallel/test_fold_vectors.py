"""Vectors by fold: what arrives is kept, in 8 bits up to half a level of its block, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_training.parallel import vectors
from rl_training.parallel.fold_vectors import BLOCK, LEVELS, FoldVectors, fold_dtype
from rl_training.parallel.vectors import Layout

SIZES = {"a": 3 * BLOCK + 5, "b": 7}  # one bucket that ends within a block


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def layout_of(sizes: dict[str, int] = SIZES) -> Layout:
    return Layout.of({name: torch.zeros(size) for name, size in sizes.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_in_parts_is_added_and_what_never_arrives_is_zero(dtype: torch.dtype) -> None:
    """Fold 0 gets two backwards, folds 1 and 2 arrive together in two parts, and fold 3 gets nothing."""
    layout = layout_of()
    by_fold, size = FoldVectors(layout, 4, dtype), layout.num_entries
    first, second, both = drawn(1, size), drawn(1, size + 1)[:, :size], drawn(2, size)
    for vector in (first, second):
        by_fold.receiver(range(1)).take(0, 0, vector)
    for columns in (slice(0, BLOCK), slice(BLOCK, size)):
        by_fold.receiver(range(1, 3)).take(0, columns.start, both[:, columns])
    by_fold.complete()
    expected = torch.cat([first + second, both, torch.zeros(1, size)])
    largest = expected.abs().max()
    tolerance = {torch.float32: 0.0, torch.bfloat16: 2.0**-7 * largest}[dtype]
    (kept,) = by_fold.means()
    assert (kept - expected).abs().max() <= tolerance
    assert not kept[3].any()
    for columns in (slice(0, size), slice(5, BLOCK + 9), slice(BLOCK, 2 * BLOCK)):  # also within blocks
        assert torch.equal(by_fold.of(0, columns, 1), kept[1, columns])
        assert torch.equal(by_fold.of(0, columns, slice(1, 3)), kept[1:3, columns])
    by_fold.factors = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    assert torch.equal(by_fold.means(range(1, 3))[0], torch.tensor([[2.0], [4.0]]) * kept[1:3])
    weights = torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64)
    torch.testing.assert_close(by_fold.sum(weights)[0], (weights * by_fold.factors).float() @ kept)


def test_8_bits_round_to_half_a_level_of_the_block_without_bias_and_keep_nan() -> None:
    layout = layout_of({"a": 4096 * BLOCK})
    scale = 10.0 ** torch.arange(-8, 8).repeat_interleave(256 * BLOCK)  # blocks of very different sizes
    exact = scale * drawn(4096 * BLOCK)
    exact[:BLOCK] = 0.0
    exact[-1] = torch.nan
    by_fold = FoldVectors(layout, 1, torch.int8)
    by_fold.receiver(range(1)).take(0, 0, exact.unsqueeze(0))
    kept = by_fold.of(0, slice(0, len(exact)), 0)
    assert kept[-BLOCK:].isnan().all()
    assert not kept[:BLOCK].any()
    blocks, errors = (part[BLOCK:-BLOCK].view(-1, BLOCK).double() for part in (exact, kept - exact))
    levels = errors / (blocks.abs().amax(dim=1, keepdim=True) / LEVELS)
    assert levels.abs().max() <= 0.5001
    assert abs(levels.mean()) < 5 * levels.std() / levels.numel() ** 0.5
    assert levels.std() == pytest.approx(12**-0.5, rel=0.01)
    assert by_fold.num_bytes == len(exact) * (1 + 4 / BLOCK)


def test_rounding_bounds_the_distance_of_heavy_tailed_rows() -> None:
    """A few large entries in a block leave the others few levels."""
    layout, draw = layout_of({"a": 512 * BLOCK}), torch.Generator().manual_seed(0)
    by_fold = FoldVectors(layout, 1, torch.int8)
    normal = torch.randn(3, 512 * BLOCK, generator=draw)
    exact = normal[0] / normal[1:].square().mean(dim=0).sqrt()  # Student's t with two degrees of freedom
    by_fold.receiver(range(1)).take(0, 0, exact.unsqueeze(0))
    distance = (by_fold.of(0, slice(0, len(exact)), 0) - exact).norm() / exact.norm()
    assert 0.002 < float(distance) < by_fold.rounding


def test_only_large_vectors_are_kept_in_8_bits_unless_asked(monkeypatch) -> None:
    layout = layout_of()
    assert fold_dtype(layout) == torch.float32
    assert fold_dtype(layout, torch.int8) == torch.int8
    monkeypatch.setattr(vectors, "LARGE", layout.num_entries)
    assert fold_dtype(layout) == torch.int8
    assert fold_dtype(layout, torch.float32) == torch.float32
    assert fold_dtype(Layout.of({"a": torch.zeros(9).double()}), torch.float32) == torch.float64
