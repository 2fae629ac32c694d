"""The state of a plain loop between two calls: which call may come next, and how the latest step ended."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rl_training.errors import UserError

# The places of a loop, in the order of a training. A call in the wrong place is an error.
OUTSIDE, BETWEEN = "outside `with measured_loop(...)`", "between two steps"
BATCHES, READY, STEPPED = "in the microbatches", "past gradients_ready()", "past optimizer.step()"
SKIPPED = "past skip_step()"


@dataclass(frozen=True)
class LoopLife:
    """The state of a loop between two calls."""

    place: str = OUTSIDE
    open_number: int = 0  # number of the open step
    rollout_number: int = 0  # rollout that the open step learns from
    number: int | None = None  # number of the latest step that ended
    was_left_out: bool = False  # whether that step was left out without skip_step()
    learned_rollout: int | None = None  # rollout of the latest step that the optimizer made

    def expect(self, place: str, what: str) -> None:
        """Raise UserError, with what to do, if the loop is not at this place."""
        if self.place != place:
            raise UserError(f"{what}: the loop is {self.place}")

    def at(self, place: str) -> LoopLife:
        """Return the state at another place."""
        return dataclasses.replace(self, place=place)

    def begun(self, number: int, rollout_number: int | None) -> LoopLife:
        """Return the state at the beginning of a step, before its microbatches.

        Args:
            number: The step's number. The first may be any from 1 on, the others must be consecutive.
            rollout_number: The rollout that it learns from. None if it has its own.

        Raises:
            UserError: If the number does not follow the latest step's.
        """
        if number < 1:
            raise UserError(f"step {number}: number the optimizer steps from 1")
        if self.number is not None and number != self.number + 1:
            raise UserError(f"step {number} follows step {self.number}: number the optimizer steps consecutively")
        learns_from = number if rollout_number is None else rollout_number
        return dataclasses.replace(self, place=BATCHES, open_number=number, rollout_number=learns_from)

    @property
    def learns_again(self) -> bool:
        """Whether the open step learns from the same rollout as the latest step that the optimizer made."""
        return self.rollout_number == self.learned_rollout

    def ended(self, was_left_out: bool) -> LoopLife:
        """Return the state after the open step.

        Args:
            was_left_out: Whether neither optimizer.step() nor skip_step() was called.
        """
        learned = self.rollout_number if self.place == STEPPED else self.learned_rollout
        return dataclasses.replace(
            self, place=BETWEEN, number=self.open_number, was_left_out=was_left_out, learned_rollout=learned
        )
