"""The mean gradients of the last steps, a parameter-size row each, and this step's products with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.mathematics.square_norms import AdamMetric
from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.types import StepContext

NO_STEP = -1


class PastGradients:
    """Keeps the mean gradients, not clipped, of the last `lags` steps that were measured."""

    def __init__(self, lags: int) -> None:
        self.lags = lags
        self._rows: FlatVectors | None = None
        self._steps = torch.full((lags,), NO_STEP)
        self._loaded: Tensor | None = None

    def products(self, ctx: StepContext, metric: AdamMetric) -> Tensor:
        """Returns g_s · g_{s−n} for n = 1 … lags, (2, lags) fp64: plain and in Adam's metric; then keeps g_s.

        nan where step s − n was not measured, and in the metric of an Adam that is not warm.
        """
        if self._rows is None:
            self._rows = FlatVectors(ctx.parameters, self.lags)
            if self._loaded is not None:
                self._rows.matrix.copy_(self._loaded)
        rows = self._rows
        gradient = rows.flatten(gradient.detach() for gradient in ctx.gradients.values())
        names, sizes = tuple(ctx.gradients), [g.numel() for g in ctx.gradients.values()]
        weighted = metric.weigh(names, metric.weigh(names, gradient, sizes), sizes)
        known = rows.dot(torch.stack([gradient, weighted])).cpu()
        products = torch.full((2, self.lags), torch.nan, dtype=torch.float64)
        for row, step in enumerate(self._steps.tolist()):
            if step != NO_STEP and 1 <= ctx.step - step <= self.lags:
                products[:, ctx.step - step - 1] = known[row]
        oldest = int(self._steps.argmin())
        rows.matrix[oldest] = gradient
        self._steps[oldest] = ctx.step
        return products

    @property
    def num_bytes(self) -> int:
        return self._rows.num_bytes if self._rows is not None else 0

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the rows and their steps; nothing before the first step."""
        rows = self._rows.matrix if self._rows is not None else self._loaded
        return {} if rows is None else {"rows": rows, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` returned. Rows of another number of lags are not used."""
        if state and len(state["steps"]) == self.lags:
            self._rows, self._loaded, self._steps = None, state["rows"], state["steps"].clone()
