"""Square norms by parameter, plain and in Adam's metric: |g|² and Σ P g², P that of the step before."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.mathematics.vectors import Layout, Vector, sums_of_spans


def square_norms(layout: Layout, rows: Vector, roots: Sequence[Tensor | float] | None) -> Tensor:
    """Returns |g|² and Σ P g² by row and parameter, (rows, parameters, 2) fp64; the second is nan without roots, √P.

    A row of a bucket at a time: operations do not grow with the number of parameters.
    """
    found = []
    for bucket, part, root in zip(layout.buckets, rows, roots or [math.nan] * len(rows), strict=True):
        own = (row.to(layout.device, layout.dtype) for row in part)
        squares = (torch.cat([row, row * root]).square_() for row in own)
        found.append(torch.stack([sums_of_spans(both, bucket.sizes * 2).view(2, -1) for both in squares]))
    return torch.cat(found, dim=2).transpose(1, 2)
