"""Refuses weights that are not finite, which a training that has diverged leaves behind."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from rl_training.errors import UserError


def refuse_diverged(weights: Iterable[tuple[str, Tensor]], place: str = "") -> None:
    """Raise UserError, which begins with the place of the weights, for the first of them that is not finite."""
    for name, tensor in weights:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError(f"{place}{name} is not finite: training had diverged; choose an earlier checkpoint")
