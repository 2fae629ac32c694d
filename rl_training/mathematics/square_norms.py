"""Square norms by parameter, plain and in Adam's metric: |g|² and Σ P g², P that of the step before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.mathematics.adamw import AdamWState
from rl_training.mathematics.vectors import Layout, Vector


def adam_roots(layout: Layout, states: Mapping[str, object] | None) -> Vector:
    """Returns √P of the step before; nan for the entries of parameters without a warm state of AdamW's."""
    roots = layout.zeros()
    for name, root in layout.by_name(roots).items():
        state = (states or {}).get(name)
        if isinstance(state, AdamWState) and state.is_warm:
            root.copy_(state.preconditioner().sqrt_())
        else:
            root.fill_(torch.nan)
    return roots


def square_norms(layout: Layout, rows: Vector, roots: Vector | None) -> Tensor:
    """Returns |g|² and Σ P g² by row and parameter, (rows, parameters, 2) fp64; the second is nan without roots."""
    found = []
    for number, (bucket, part) in enumerate(zip(layout.buckets, rows, strict=True)):
        own = part.to(layout.device, layout.dtype)
        plain = _by_parameter(own, bucket.sizes)
        weighted = torch.full_like(plain, torch.nan)
        if roots is not None:
            weighted = _by_parameter(own * roots[number], bucket.sizes)
        found.append(torch.stack([plain, weighted], dim=-1))
    return torch.cat(found, dim=1)


def _by_parameter(rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Returns the square norms of the parts of each row, (rows, parts) fp64."""
    norms = torch._foreach_norm([piece for row in rows for piece in row.split(sizes)])
    return torch.stack(norms).double().square().view(len(rows), len(sizes))
