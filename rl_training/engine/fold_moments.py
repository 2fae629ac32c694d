"""The optimizer's moments as if no step since the rollout had learned from a given fold.

Where several optimizer steps learn from the same responses (num_iterations > 1), the second step's momentum holds their
noise: leaving fold k out of its gradient alone does not give a step that never saw fold k. So from the first step that
learns from a fold, moments without it are carried along beside the optimizer's,

    (m, v)_(−k)  ←  the optimizer's rule with g_(−k), clipped by its own norm, where the step learns from fold k
                    and with the step's clipped g, where it learns from other responses of the rollout

and δθ_(−k) is the step from there. Fold k still influences the parameters themselves, through its
share of the earlier steps: an effect of second order in the learning rate (docs/explanation/theory.md).

Memory: per fold, parameter-size rows for each moment and for the last δθ_(−k): 3 with Adam, 2 with SGD's momentum; only
in runs that learn from a rollout again. They live from one rollout to the next, and are in no checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.batch import Batch
from rl_training.engine.updates import Piece
from rl_training.mathematics.vectors import Layout, Vector, num_bytes, rows_dot


class FoldMoments:
    """The moments without each fold of the present rollout, block by block: a block is what one step learns from."""

    def __init__(self, layout: Layout, device: str | None = None) -> None:
        self._layout, self._device = layout, device
        self._blocks: dict[tuple[int, ...], Block] = {}
        self._last: tuple[int, int] | None = None  # rollout and step that were followed last

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._blocks.values())

    def before(self, number: int, batch: Batch) -> Block | None:
        """Returns the moments without each fold of step `number`, before it.

        None where no step has learned from these folds, or one since then was not followed.
        """
        if self._last != (batch.rollout_number, number - 1):
            self._blocks.clear()
        return self._blocks.get(_block_of(batch))

    def follow(
        self,
        number: int,
        batch: Batch,
        reused: bool,
        pieces: Sequence[Piece],
        gradient: Vector,
        without: Callable[[slice, Piece], Tensor],
    ) -> None:
        """Advances the moments by this step. Call `before` for the same step first.

        gradient  of the whole step, clipped
        without   folds, piece → (folds, n), that of the other folds, clipped: what the step without each is made from
        """
        mine = _block_of(batch)
        if mine not in self._blocks and not reused:
            self._blocks[mine] = Block(self._layout, batch.num_folds, self._device)
        for name, block in self._blocks.items():
            block.step(pieces, without if name == mine else lambda _, piece: piece.of(gradient).unsqueeze(0))
        self._last = (batch.rollout_number, number)


class Block:
    """What one step learns from, fold by fold: the moments without each, and the last step that they make, δθ_(−k)."""

    def __init__(self, layout: Layout, num_folds: int, device: str | None) -> None:
        self._layout, self._num_folds, self._device = layout, num_folds, device
        self._moments: dict[str, Vector] = {}  # (K, n) of each bucket, by their name in the optimizer's state
        self._began = False  # before its first step, the moments without a fold are the optimizer's
        self._updates = layout.zeros(num_folds, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(map(num_bytes, (self._updates, *self._moments.values())))

    def update_without(self, fold: int) -> Vector:
        """Returns the last step without this fold."""
        return [part[fold] for part in self._updates]

    def dots(self, direction: Vector) -> Tensor:
        """Returns the products of the last step without each fold with this direction, (K,) fp64."""
        parts = zip(self._updates, direction, strict=True)
        return torch.stack([rows_dot(rows.to(x.device), x) for rows, x in parts]).sum(dim=0)

    def without(self, folds: slice, piece: Piece) -> Piece:
        """Returns the piece with the moments that never saw each of these folds, (folds, n)."""
        if not self._began:
            return piece
        moments: dict[str, Any] = {
            name: piece.of(rows)[folds].to(piece.param.device) for name, rows in self._moments.items()
        }
        return dataclasses.replace(piece, state=dataclasses.replace(piece.state, **moments))

    def step(self, pieces: Sequence[Piece], gradient_without: Callable[[slice, Piece], Tensor]) -> None:
        """Moves the moments without each fold by a step with its clipped gradient, and keeps its δθ."""
        everything = slice(None)
        for piece in pieces:
            state, gradient = self.without(everything, piece).state, gradient_without(everything, piece)
            piece.of(self._updates).copy_(state.delta(piece.param, gradient).total)
            for name, moment in vars(state.after(piece.param, gradient)).items():
                if isinstance(moment, Tensor):
                    if name not in self._moments:
                        self._moments[name] = self._layout.zeros(self._num_folds, device=self._device)
                    piece.of(self._moments[name]).copy_(moment)
        self._began = True


def _block_of(batch: Batch) -> tuple[int, ...]:
    return tuple(batch.rollout.prompt_index.tolist())
