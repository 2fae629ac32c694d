"""Whether a step was what its predictions are made of: the folds' gradients, and the optimizer's formula.

A loop may scale, edit or forget gradients, clip otherwise than it said, or step with another optimizer. None of that is
listed anywhere: what happens is held against what was calculated, and a step that differs has no predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rl_training.engine.probe import Need, Probe
from rl_training.engine.shards import Shard
from rl_training.engine.step import Step
from rl_training.engine.updates import UpdateHistory
from rl_training.mathematics.vectors import Layout, dot, dots

SAMPLED = 2**20  # entries of the step that are compared, at most
LIMIT = 1e-3  # of the norm of what was calculated
LIMIT_ROUNDED = 0.05  # where gradients are summed in half precision
NOT_THE_FORMULA = (
    "the step was not the optimizer's formula: the weights' change differs from it by {error:.2g} of its norm "
    "(step/formula_error); clip as max_grad_norm says, and step once, with this optimizer and learning rate"
)
EDITED = "weights were changed after it by something else than the optimizer"
ROUNDING = 1e-5  # of the norms of the folds' gradients, whose sum may nearly cancel


def why_not_the_sum(step: Step, rounded: bool) -> str:
    """Returns why the step's gradient is not the mean of its folds' gradients, "" if it is or rows are not kept.

    rounded  the loop sums gradients in half precision. A collective.
    """
    rows, sizes, reduce = step.gradients.rows, step.fold_sizes, step.ranks.reduce
    if rows is None:
        return ""
    mean = step.gradients.layout.vector(step.gradients.mean.values())
    shares = (sizes / sizes.sum()).to(rows[0])
    differences = ((one - (shares @ part).to(one.device)) for one, part in zip(mean, rows, strict=True))
    off = torch.stack([dots(difference, difference) for difference in differences]).sum()
    parts = torch.cat([torch.stack([off, dot(mean, mean)]), dot(rows, rows).to(off.device)])
    off, norm, *norms = reduce(parts).sqrt().tolist()
    allowed = (LIMIT_ROUNDED if rounded else LIMIT) * norm + ROUNDING * sum(norms)
    if not math.isfinite(off) or off <= allowed:
        return ""
    return (
        f"the gradient differs from that of the microbatches by {off / norm if norm else math.inf:.2g} of its norm: a "
        "backward too many, a zero_grad missing or between microbatches, a GradScaler, or gradients that were edited"
    )


def sampled(layout: Layout, entries: Iterable[Tensor]) -> Tensor:
    """Returns some entries of each parameter, at most SAMPLED in all: a copy in fp64."""
    stride = max(1, math.ceil(layout.num_entries / SAMPLED))
    return torch.cat([values[::stride] for values in entries]).to(layout.device, torch.float64)


class StepGuard:
    """Holds what each step does against the optimizer's formula, and discards the predictions of one that differs."""

    def __init__(
        self, shard: Shard, layout: Layout, history: UpdateHistory, reduce: Callable[[Tensor], Tensor]
    ) -> None:
        self._shard, self._layout, self._history, self._reduce = shard, layout, history, reduce
        self._probes: list[Probe] = []  # of the step that is checked
        self._states: list[Mapping[str, Tensor]] = []  # theirs before it
        self._before = self._formula = torch.empty(0)  # some weights before the step, and what the formula adds to them
        self._after: Tensor | None = None  # and after it

    def notice_edits(self) -> None:
        """Forgets the step before where weights are no longer those that it ended with. A collective."""
        if self._after is not None:
            changed = (sampled(self._layout, self._shard.weights().values()) != self._after).any()
            if float(self._reduce(changed.double())) > 0.0:
                self._history.forget(EDITED)
        self._after = None

    def ready(self, step: Step, probes: Sequence[Probe]) -> None:
        """Keeps what it takes to check the step that follows."""
        self._probes = predicting(probes) if step.first_order is not None and step.first_order.update else []
        if self._probes and step.first_order is not None and step.first_order.update is not None:
            self._states = [probe.state_dict() for probe in self._probes]
            self._before = sampled(self._layout, step.gradients.weights.values())
            self._formula = sampled(self._layout, self._layout.by_name(step.first_order.update).values())

    def stepped(self) -> float | None:
        """Returns |what happened − formula| / |formula|, None where there was no formula. A collective."""
        if not self._probes:
            return None
        weights = self._shard.weights()
        self._after = sampled(self._layout, weights.values())
        error = self._error(self._after, max(torch.finfo(weight.dtype).eps for weight in weights.values()))
        if error > LIMIT:
            reason = NOT_THE_FORMULA.format(error=error)
            self._history.forget(reason)
            for probe, state in zip(self._probes, self._states, strict=True):
                probe.load_state_dict(state)
                probe.discard(reason)
        return error

    def _error(self, after: Tensor, precision: float) -> float:
        """Returns the error beyond the rounding of weights; inf where the formula says that nothing happens."""
        rounding = precision * self._before.abs()
        off = (after - self._before - self._formula).abs().sub_(rounding).clamp_(min=0.0)
        off_square, square = self._reduce(torch.stack([off.square().sum(), self._formula.square().sum()])).tolist()
        if square == 0.0:
            return 0.0 if off_square == 0.0 else math.inf
        return math.sqrt(off_square / square)


def predicting(probes: Sequence[Probe]) -> list[Probe]:
    """Returns those that multiply something with the optimizer's step."""
    return [probe for probe in probes if Need.ENTROPY_GRADIENT in probe.needs]
