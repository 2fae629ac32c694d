"""Gradients of folds that cut a microbatch in slices: the training's own backward gives only their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.loss_weights import LossWeights


def fill_slices(
    buffer: FlatVectors,
    parameters: Mapping[str, nn.Parameter],
    folds: Sequence[range],
    microbatch_rows: Sequence[range],
    loss_weights: LossWeights,
    score: Callable[[Tensor], Scores],
) -> None:
    """Splits each microbatch's gradient, which is in the row of its first fold, among the folds that cut it in slices.

    A slice's gradient comes from a forward pass and a backward of its own, that of the last slice from the difference:
    for s slices that costs (s − 1)/s of what the training's own cost. Without slices, nothing is done.
    """
    for microbatch in microbatch_rows:
        inside = [k for k, rows in enumerate(folds) if rows.start in microbatch and rows.stop <= microbatch.stop]
        if len(inside) < 2:
            continue
        rest = len(microbatch) * buffer.matrix[inside[0]]
        for k in inside[:-1]:
            rows = torch.arange(folds[k].start, folds[k].stop, device=loss_weights.logps.device)
            total = buffer.flatten(loss_weights.gradient(score(rows), rows, list(parameters.values())))
            buffer.matrix[k] = total / len(rows)
            rest -= total
        buffer.matrix[inside[-1]] = rest / len(folds[inside[-1]])
