"""The rows of a step's updates, and the one that outlives it: δθ of the step before, for `backward`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.types import StepContext
from rl_training.step.updates import FIRST_FOLD, PREVIOUS, WHOLE


class UpdateRows:
    """The rows of updates.py, (2 + K, P), kept from step to step; their row PREVIOUS goes into the checkpoint.

    device  where they lie, that of the parameters by default
    """

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._previous: Tensor | None = None  # row PREVIOUS: the δθ of `_step`
        self._step: int | None = None
        self.rows: FlatVectors | None = None

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes if self.rows is not None else 0

    def begin(self, ctx: StepContext) -> FlatVectors:
        """Returns the rows for the updates of this step, its row PREVIOUS nan unless it is the last step's."""
        num_rows = FIRST_FOLD + int(ctx.fold.max()) + 1
        if self.rows is None or self.rows.num_rows != num_rows:
            self.rows = FlatVectors(ctx.parameters, num_rows, self._device)
        previous = self.rows.matrix[PREVIOUS]
        if self._previous is None or self._step != ctx.step - 1:
            previous.fill_(torch.nan)
        elif self._previous.shape != previous.shape:
            raise ValueError(
                f"simple: the update in the checkpoint has {len(self._previous)} numbers, and {len(previous)} are "
                "trained: it is of another model. Delete its probes.safetensors, and the probe starts afresh"
            )
        else:
            previous.copy_(self._previous)
        self._previous = previous
        return self.rows

    def why_no_previous(self, ctx: StepContext) -> str:
        """Returns why δθ of the step before is not known, "" if it is."""
        if self._step is None:
            return "the first measured step: there is no update before it to look back on"
        if self._step != ctx.step - 1:
            return f"step {ctx.step - 1} was not measured, so its update is not known; backward needs every=1"
        return ""

    def keep(self, ctx: StepContext) -> None:
        """Keeps this step's δθ; without a formula for it, the old parameters until the new ones are there."""
        assert self.rows is not None
        if ctx.optimizer.states is not None:
            self.rows.matrix[PREVIOUS] = self.rows.matrix[WHOLE]
        else:
            for name, param in ctx.parameters.items():
                self.rows.view(name)[PREVIOUS] = param.detach()
        self._step = ctx.step

    def finish(self, ctx: StepContext) -> None:
        """Turns the old parameters into their difference from the new ones, behind a step without a formula."""
        if ctx.optimizer.states is None and self._step == ctx.step:
            assert self.rows is not None
            for name, param in ctx.parameters.items():
                row = self.rows.view(name)[PREVIOUS]
                row.copy_(param.detach().to(row.device) - row)

    def state_dict(self) -> dict[str, Tensor]:
        if self._previous is None or self._step is None:
            return {}
        return {"update": self._previous, "update_step": torch.tensor(self._step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._previous = state.get("update")
        self._step = int(state["update_step"]) if "update_step" in state else None
