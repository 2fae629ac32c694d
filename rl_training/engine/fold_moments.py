"""The optimizer's moments as they would stand had no step since the rollout learned from a fold.

Where a rollout serves several optimizer steps of the same responses (num_iterations > 1), the second one's momentum
holds their noise: leaving fold k out of its gradient alone does not give a step that never saw fold k. So from the
first step that learns from a fold on, moments of its own are carried along beside the optimizer's,

    (m, v)_(−k)  ←  the optimizer's rule with g_(−k), clipped by its own norm, where the step learns from fold k
                    and with the step's clipped g, where it learns from other responses of the rollout

and δθ_(−k) is the step from there. What is left of fold k's influence is that the parameters themselves have moved by
its share of the steps before: of second order in the learning rate (docs/theory.md).

Memory: per fold, parameter-size rows for each moment and for the last δθ_(−k): 3 with Adam, 2 with SGD's momentum; only
in runs that learn from a rollout again. They live from one rollout to the next, and are in no checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.types import StepContext
from rl_training.step.updates import Piece


class FoldMoments:
    """The moments without each fold of the present rollout, block by block: a block is what one step learns from."""

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._blocks: dict[tuple[int, ...], Block] = {}
        self._last: tuple[int, int] | None = None  # rollout and step that were followed last

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._blocks.values())

    def before(self, ctx: StepContext) -> Block | None:
        """Returns the moments without each fold of this step, as they stand before it.

        None where no step has learned from these folds, or one since then was not followed.
        """
        if self._last != (ctx.rollout_number, ctx.step - 1):
            self._blocks.clear()
        return self._blocks.get(_block_of(ctx))

    def follow(
        self,
        ctx: StepContext,
        pieces: Sequence[Piece],
        gradient: Tensor,
        without: Callable[[int], Tensor],
    ) -> None:
        """Takes this step along, after `before` was asked for it.

        gradient  (P,), of the whole step, clipped
        without   k → (P,), that of the other folds, clipped: what the step without fold k is made from
        """
        mine = _block_of(ctx)
        if mine not in self._blocks and not ctx.reused:
            self._blocks[mine] = Block(ctx.parameters, int(ctx.fold.max()) + 1, self._device)
        for name, block in self._blocks.items():
            block.step(pieces, without if name == mine else lambda _: gradient)
        self._last = (ctx.rollout_number, ctx.step)


class Block:
    """What one step learns from, fold by fold: the moments without each, and the last step that they make, δθ_(−k)."""

    def __init__(self, parameters: Mapping[str, Tensor], num_folds: int, device: str | None) -> None:
        self._new_rows = functools.partial(FlatVectors, parameters, num_folds, device)
        self._moments: dict[str, FlatVectors] = {}  # by their name in the optimizer's state
        self._began = False  # before its first step, the moments without a fold are the optimizer's
        self.updates = self._new_rows()

    @property
    def num_bytes(self) -> int:
        return sum(rows.num_bytes for rows in (self.updates, *self._moments.values()))

    def without(self, fold: int | slice, piece: Piece) -> Piece:
        """Returns the piece with the moments that never saw this fold, (n,); of several folds, (folds, n)."""
        if not self._began:
            return piece
        moments = {name: rows.matrix[fold, piece.columns] for name, rows in self._moments.items()}
        on_device: dict[str, Any] = {name: moment.to(piece.param.device) for name, moment in moments.items()}
        return dataclasses.replace(piece, state=dataclasses.replace(piece.state, **on_device))

    def step(self, pieces: Sequence[Piece], gradient_without: Callable[[int], Tensor]) -> None:
        """Moves the moments without each fold k by a step with the clipped `gradient_without(k)`, and keeps its δθ."""
        for k in range(self.updates.num_rows):
            gradient = gradient_without(k)
            for piece in pieces:
                state, grad = self.without(k, piece).state, gradient[piece.columns].to(piece.param.device)
                self.updates.matrix[k, piece.columns] = state.delta(piece.param, grad).total.to(self.updates.matrix)
                for name, moment in vars(state.after(piece.param, grad)).items():
                    if isinstance(moment, Tensor):
                        if name not in self._moments:
                            self._moments[name] = self._new_rows()
                        rows = self._moments[name].matrix
                        rows[k, piece.columns] = moment.to(rows)
        self._began = True


def _block_of(ctx: StepContext) -> tuple[int, ...]:
    return tuple(ctx.rollout.prompt_index.tolist())
