"""What rounding leaves of a change of weights that are kept in few bits."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded_update(param: Tensor, change: Tensor) -> Tensor:
    """Return round(θ + δ) − θ, to nearest in the dtype of θ; δ itself where δ has that dtype too.

    δ may have leading dimensions. A bf16 weight of 1 has neighbours 2⁻⁷ above and 2⁻⁸ below it:

    >>> rounded_update(torch.ones(3, dtype=torch.bfloat16), torch.tensor([0.003, 0.005, -0.005]))
    tensor([ 0.0000,  0.0078, -0.0039])
    """
    if param.dtype == change.dtype:
        return change
    exact = param.to(change.dtype)
    return (exact + change).to(param.dtype).to(change.dtype).sub_(exact)


def kept_share(param: Tensor, change: Tensor) -> Tensor:
    """Return `rounded_update` over δ, elementwise; 0 where δ is."""
    return rounded_update(param, change) / torch.where(change == 0.0, 1.0, change)
