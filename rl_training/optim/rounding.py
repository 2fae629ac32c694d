"""Rounding of a change of weights that are kept in fewer bits than fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded_update(param: Tensor, change: Tensor) -> Tensor:
    """Return round(θ + δ) − θ, rounded to nearest in the dtype of θ; δ itself if both have the same dtype.

    δ may have leading dimensions. The bf16 neighbours of 1 are 2⁻⁷ above and 2⁻⁸ below it:

    >>> rounded_update(torch.ones(3, dtype=torch.bfloat16), torch.tensor([0.003, 0.005, -0.005]))
    tensor([ 0.0000,  0.0078, -0.0039])
    """
    if param.dtype == change.dtype:
        return change
    exact = param.to(change.dtype)
    return (exact + change).to(param.dtype).to(change.dtype).sub_(exact)


def kept_share(param: Tensor, change: Tensor) -> Tensor:
    """Return the share of δ that rounding keeps, `rounded_update` divided by δ, elementwise; 0 where δ is 0."""
    return rounded_update(param, change) / torch.where(change == 0.0, 1.0, change)
