"""Whether a step was what its predictions are made of: the folds' gradients, and the optimizer's formula.

A loop may scale, edit or forget gradients, clip otherwise than it said, or step with another optimizer. None of that is
listed anywhere: what happens is held against what was calculated, and a step that differs has no predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_training.mathematics.vectors import Layout, Vector, dot

SAMPLED = 2**20  # entries of the step that are compared, at most
LIMIT = 1e-3  # of the norm of what was calculated
LIMIT_ROUNDED = 0.05  # where gradients are summed in half precision
EDITED = "weights were changed after it by something else than the optimizer"
ROUNDING = 1e-5  # of the norms of the folds' gradients, whose sum may nearly cancel


def why_not_the_sum(
    mean: Vector, rows: Vector, sizes: Tensor, reduce: Callable[[Tensor], Tensor], rounded: bool
) -> str:
    """Returns why the step's gradient is not the mean of its folds' gradients, "" if it is. A collective.

    mean, rows, sizes  as of FoldMeans            rounded  the loop sums gradients in half precision
    """
    shares = sizes / sizes.sum()
    difference = [one - (shares.to(part) @ part).to(one) for one, part in zip(mean, rows, strict=True)]
    squares = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64).square() for part in rows]
    parts = torch.cat([
        torch.stack([dot(difference, difference), dot(mean, mean)]), torch.stack(squares).sum(dim=0).to(mean[0].device)
    ])  # fmt: skip
    off, norm, *norms = reduce(parts).sqrt().tolist()
    allowed = (LIMIT_ROUNDED if rounded else LIMIT) * norm + ROUNDING * sum(norms)
    if not math.isfinite(off) or off <= allowed:
        return ""
    return (
        f"the gradient differs from that of the microbatches by {off / norm if norm else math.inf:.2g} of its norm: a "
        "backward too many, a zero_grad missing or between microbatches, a GradScaler, or gradients that were edited"
    )


def sampled(layout: Layout, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns some entries of each parameter, at most SAMPLED in all: copies in fp64."""
    stride = max(1, math.ceil(layout.num_entries / SAMPLED))
    return {name: values[::stride].to(torch.float64, copy=True) for name, values in entries.items()}


def was_edited(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    """Returns 1 where any of these entries differ, else 0."""
    changed = [(after[name] != values).any() for name, values in before.items() if len(values)]
    return torch.stack(changed).any().double() if changed else torch.zeros((), dtype=torch.float64)


class StepCheck:
    """Holds the change of some entries of each parameter against the optimizer's formula."""

    def __init__(self, layout: Layout, weights: Mapping[str, Tensor], update: Vector) -> None:
        self._layout = layout
        self._before = sampled(layout, weights)
        self._formula = sampled(layout, layout.by_name(update))

    def error(self, weights: Mapping[str, Tensor], reduce: Callable[[Tensor], Tensor]) -> float:
        """Returns |what happened − formula| / |formula| of these entries, beyond the rounding of weights. A collective.

        inf where something happened although the formula says nothing would
        """
        sums = torch.zeros(2, dtype=torch.float64, device=next(iter(self._before.values())).device)
        for name, after in sampled(self._layout, weights).items():
            formula, rounding = self._formula[name], torch.finfo(weights[name].dtype).eps * self._before[name].abs()
            off = (after - self._before[name] - formula).abs().sub_(rounding).clamp_(min=0.0)
            sums += torch.stack([off.square().sum(), formula.square().sum()])
        off_square, square = reduce(sums).tolist()
        if square == 0.0:
            return 0.0 if off_square == 0.0 else math.inf
        return math.sqrt(off_square / square)


def why_distrusted(error: float) -> str:
    """Returns why a step with this error has no predictions, "" if it has."""
    if error <= LIMIT:
        return ""
    return (
        f"the step was not the optimizer's formula: the weights' change differs from it by {error:.2g} of its norm "
        "(step/formula_error); clip as max_grad_norm says, and step once, with this optimizer and learning rate"
    )
