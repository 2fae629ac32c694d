"""How much of a change survives rounding."""

from __future__ import annotations

import math

import pytest
import torch

from rl_training.optim.rounding import kept_share, rounded_update


def nearest_bf16(value: float) -> float:
    """Round a double to the nearest bf16 number (eight significant bits), ties to even."""
    if value == 0.0:
        return 0.0
    spacing = 2.0 ** (math.frexp(value)[1] - 8)
    return round(value / spacing) * spacing  # Python rounds halves to even


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4, 1e-2])
def test_the_rounded_update_equals_rounding_to_nearest_in_float64(rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = (0.02 * torch.randn(2000, generator=generator)).bfloat16()
    change = rate * torch.randn(3, 2000, generator=generator)
    change[:, :50] = 0.0
    change[0, 50:150] = weights[50:150].float() * 2.0**-9  # halfway to the next number, or nearly
    expected = [
        [nearest_bf16(w + d) - w for w, d in zip(weights.double().tolist(), row, strict=True)]
        for row in change.double().tolist()
    ]
    update = rounded_update(weights, change)
    assert update.dtype == torch.float32
    assert update.double().tolist() == expected
    share = kept_share(weights, change)
    torch.testing.assert_close(share * change, update)
    assert torch.equal(share[:, :50], torch.zeros(3, 50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_full_precision_keep_the_whole_update(dtype: torch.dtype) -> None:
    change = torch.randn(5, dtype=dtype)
    assert rounded_update(torch.randn(5, dtype=dtype), change) is change
