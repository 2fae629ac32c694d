"""The base class of every probe: the moments of an optimizer step that it can listen to, and what it must answer.

A probe is told of the moments in this order, on every rank, at each step that it measures:

    on_rollout(rollout)              a generation batch was sampled and rewarded; its scores are not known yet
    on_forward(microbatch)           the training's forward pass over a microbatch is done: log-probabilities, entropies
    on_backward(microbatch)          its gradient is in
    on_pre_optimizer_step(ctx)       all gradients are in, averaged over ranks, not clipped; parameters still old
    on_optimizer_step(ctx)           parameters and optimizer states have moved
    measure(ctx)                     answer: name → Estimate

`on_pre_optimizer_step` has the name of a moment of Hugging Face's TrainerCallback, which comes after clipping: here it
is before, since what clipping does is one of the questions.

It must change nothing of training: no `.backward()`, no write to parameters, gradients or states. What it cannot
measure it answers with `Estimate.missing(reason)`, never by leaving the name out. A new probe is one such class in
one file, a three-line YAML in conf/probe and a test.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from torch import Tensor

from rl_training.mathematics.estimate import Estimate
from rl_training.step.rollout import Rollout
from rl_training.step.types import Microbatch, StepContext


class Need(enum.Flag):
    """What costs memory or time and is therefore kept only if a probe asks for it."""

    NOTHING = 0
    FOLD_GRADIENTS = enum.auto()  # one parameter-size fp32 row per fold: ctx.fold_gradients
    MICROBATCH_SQ_NORMS = enum.auto()  # a few numbers per parameter and microbatch: ctx.microbatch_sq_norms


class Probe:
    """A measurement that runs inside the training loop. Subclasses override the moments they need, and `measure`.

    name       names it in probes.jsonl and in probe_cost/<name>_seconds
    needs      what the driver must keep for it
    every      measure each `every`-th optimizer step, the first one included
    num_folds  with FOLD_GRADIENTS: folds of whole prompts on each rank; None for the driver's choice
    offload    with FOLD_GRADIENTS: keep them in the CPU's memory
    """

    name: str
    needs: Need = Need.NOTHING
    num_folds: int | None = None
    offload: bool = False

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"{self.name}: every={every} must be at least 1 (measure each `every`-th step)")
        self.every = every

    def measures_at(self, step: int) -> bool:
        """Returns whether this probe measures at this optimizer step, counted from 1."""
        return (step - 1) % self.every == 0

    def on_rollout(self, rollout: Rollout) -> None: ...

    def on_forward(self, microbatch: Microbatch) -> None: ...

    def on_backward(self, microbatch: Microbatch) -> None: ...

    def on_pre_optimizer_step(self, ctx: StepContext) -> None: ...

    def on_optimizer_step(self, ctx: StepContext) -> None: ...

    def measure(self, ctx: StepContext) -> dict[str, Estimate]:
        """Returns the step's estimates by metric name."""
        raise NotImplementedError(f"{type(self).__name__} must say what it measured: implement measure(ctx)")

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes of the parameter-size buffers that this probe holds at present."""
        return 0

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what a resumed run needs to go on as if never stopped, the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` returned."""
        if state:
            raise ValueError(f"{self.name}: the checkpoint holds state {sorted(state)} that this probe does not have")
