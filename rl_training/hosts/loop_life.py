"""Where a plain loop stands, as a value: which call may come next, and what its latest step has left."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rl_training.errors import UserError

# Where it may stand, in the order of a training. Calls in the wrong place are refused.
OUTSIDE, BETWEEN = "outside `with measured_loop(...)`", "between two steps"
BATCHES, READY, STEPPED = "in the microbatches", "past gradients_ready()", "past optimizer.step()"
SKIPPED = "past skip_step()"


@dataclass(frozen=True)
class LoopLife:
    """A loop between two calls."""

    place: str = OUTSIDE
    open_number: int = 0  # of the step that is open
    rollout_number: int = 0  # that it learns from
    number: int | None = None  # of the latest step that has ended
    was_left_out: bool = False  # that step, without a word
    learned_rollout: int | None = None  # that the latest step that was made has learned from

    def expect(self, place: str, what: str) -> None:
        """Raise UserError, with what to do, where the loop stands anywhere else."""
        if self.place != place:
            raise UserError(f"{what}: the loop is {self.place}")

    def at(self, place: str) -> LoopLife:
        """Return the loop at another place."""
        return dataclasses.replace(self, place=place)

    def begun(self, number: int, rollout_number: int | None) -> LoopLife:
        """Return the loop in the microbatches of a step.

        Args:
            number: of the step.
            rollout_number: that it learns from; None: from its own.

        Raises:
            UserError: it does not follow the latest one; the first may have any number from 1 on.
        """
        if number < 1:
            raise UserError(f"step {number}: number the optimizer steps from 1")
        if self.number is not None and number != self.number + 1:
            raise UserError(f"step {number} follows step {self.number}: number the optimizer steps consecutively")
        learns_from = number if rollout_number is None else rollout_number
        return dataclasses.replace(self, place=BATCHES, open_number=number, rollout_number=learns_from)

    @property
    def learns_again(self) -> bool:
        """Whether the open step learns from the rollout that the latest one has learned from."""
        return self.rollout_number == self.learned_rollout

    def ended(self, was_left_out: bool) -> LoopLife:
        """Return the loop after its step.

        Args:
            was_left_out: without a word: neither the optimizer has made it, nor skip_step() was called.
        """
        learned = self.rollout_number if self.place == STEPPED else self.learned_rollout
        return dataclasses.replace(
            self, place=BETWEEN, number=self.open_number, was_left_out=was_left_out, learned_rollout=learned
        )
