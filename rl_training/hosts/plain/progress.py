"""The progress of a plain loop between two calls: which call may come next, and how the latest step ended."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from rl_training.errors import UserError


class Phase(StrEnum):
    """The phases of a loop, in the order of a training. A call in the wrong phase is an error."""

    OUTSIDE = "outside `with measured_loop(...)`"
    BETWEEN_STEPS = "between two steps"
    IN_MICROBATCHES = "in the microbatches"
    GRADIENTS_READY = "past gradients_ready()"
    STEPPED = "past optimizer.step()"
    SKIPPED = "past skip_step()"


@dataclass(frozen=True)
class LoopProgress:
    """The progress of a loop between two calls."""

    phase: Phase = Phase.OUTSIDE
    open_step_number: int = 0
    rollout_number: int = 0  # rollout that the open step learns from
    last_step_number: int | None = None  # of the latest step that ended
    was_left_out: bool = False  # whether that step was left out without skip_step()

    def require(self, phase: Phase, what: str) -> None:
        """Raise UserError, with what to do, if the loop is not in this phase."""
        if self.phase != phase:
            raise UserError(f"{what}: the loop is {self.phase}")

    def in_phase(self, phase: Phase) -> LoopProgress:
        """Return the progress in another phase."""
        return dataclasses.replace(self, phase=phase)

    def after_begin(self, number: int, rollout_number: int | None) -> LoopProgress:
        """Return the progress at the beginning of a step, before its microbatches.

        Args:
            number: The step's number. The first may be any from 1 on, the others must be consecutive.
            rollout_number: The rollout that it learns from. None if it has its own.

        Raises:
            UserError: If the number does not follow the latest step's.
        """
        if number < 1:
            raise UserError(f"step {number}: number the optimizer steps from 1")
        last = self.last_step_number
        failed = self.open_step_number if self.open_step_number > (last or 0) else 0
        if failed and number == failed + 1:
            raise UserError(
                f"step {failed} failed before it ended, and the weights are as before it: begin step({failed}) again, "
                "with this batch or another, before any later one"
            )
        if last is not None and number != last + 1:
            raise UserError(f"step {number} follows step {last}: number the optimizer steps consecutively")
        rollout = number if rollout_number is None else rollout_number
        return dataclasses.replace(self, phase=Phase.IN_MICROBATCHES, open_step_number=number, rollout_number=rollout)

    def after_end(self, was_left_out: bool) -> LoopProgress:
        """Return the progress after the open step.

        Args:
            was_left_out: Whether neither optimizer.step() nor skip_step() was called.
        """
        return dataclasses.replace(
            self,
            phase=Phase.BETWEEN_STEPS,
            last_step_number=self.open_step_number,
            was_left_out=was_left_out,
        )
