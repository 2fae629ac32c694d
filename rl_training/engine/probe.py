"""What a probe is: settings, and functions from a step and a state to a reading. Values alone go from step to step.

    init()                       the state that a training begins with
    measure(ctx, state)          all gradients are in, averaged over ranks, not clipped; the parameters are still old
    after_step(ctx, reading)     parameters and optimizer have moved, unless the loop has left the step out; optional

On each optimizer step that a probe measures, both are called on every rank. The driver owns the states. It keeps the
state of a reading once the step has been verified: where the optimizer has made another step than its formula says,
what was predicted is nan, and the state that came with a prediction is dropped. The state of a reading that predicts
nothing is kept at once, so that no two states are held at the optimizer's step.

A probe must change nothing of training: no `.backward()`, no write to parameters, gradients or states. What it cannot
measure it answers with `Estimate.missing(reason)`, never by leaving the name out. A new probe is one such class in
one file, a three-line YAML in conf/probe and a test.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_training.engine.context import StepContext
from rl_training.errors import UserError
from rl_training.options import check_whole
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.limit import Limit
from rl_training.step.data import EntropySettings
from rl_training.step.needs import Need


@dataclass(frozen=True)
class Reading:
    """What a probe says of one step.

    A probe may subclass it, with fields for what `after_step` needs of `measure`: they are gone with the step.
    """

    predicted: Mapping[str, Estimate] = field(default_factory=dict)  # by metric: if the step is the optimizer's formula
    measured: Mapping[str, Estimate] = field(default_factory=dict)  # by metric: whatever the step is
    state: Any = None  # for the next step that the probe measures

    @property
    def estimates(self) -> dict[str, Estimate]:
        """All estimates by metric."""
        return {**self.measured, **self.predicted}

    def without_predictions(self, limit: Limit) -> Reading:
        """Return the reading of a step that was not the formula's."""
        return dataclasses.replace(self, predicted=dict.fromkeys(self.predicted, Estimate.missing(limit)))


class Probe(ABC):
    """A measurement that runs inside a training loop. An object holds settings, and nothing of a training.

    name        names it in probes.jsonl and in probe_cost/<name>_seconds
    needs       what must be kept for it
    every       measure each `every`-th step, the first one included
    num_folds   with FOLD_GRADIENTS: folds of whole prompts, over all processes; None for the default, 8 or some more
    offload     with FOLD_GRADIENTS: keep them in the CPU's memory
    rows_dtype  with FOLD_GRADIENTS: keep them in it; None for fp32, or fp64 where the weights have it
    entropy     with ENTROPY_…: how the entropy gradient is estimated; None for what another probe says, or default
    """

    name: str
    needs: Need = Need.NOTHING
    num_folds: int | None = None
    offload: bool = False
    rows_dtype: torch.dtype | None = None
    entropy: EntropySettings | None = None

    def __init__(self, every: int = 1) -> None:
        check_whole(f"{self.name}: every", every, 1, " (measure each `every`-th step)")
        self.every = every

    def init(self) -> Any:
        """Return the state that a training begins with; None: the probe remembers nothing from step to step.

        A state is a tensor, a number, a ShardedVector, or a frozen dataclass or dictionary of such values. Checkpoints
        keep it: a resumed run goes on as if never stopped. Except for ShardedVectors it is the same on every rank.
        """
        return None

    @abstractmethod
    def measure(self, ctx: StepContext, state: Any) -> Reading:
        """Return what the old parameters say of the step, and the state for the step after it."""

    def after_step(self, ctx: StepContext, reading: Reading) -> Reading:
        """Return what is said of the step once it has been made: what `measure` has returned, and more."""
        return reading

    def measures_at(self, number: int) -> bool:
        """Return whether this probe measures at this optimizer step, counted from 1."""
        return (number - 1) % self.every == 0

    def num_vectors(self, num_folds: int) -> int:
        """Return how many fp32 vectors of all trained parameters it holds on the device while it measures a step.

        Beside those that are kept for it; `num_folds` are this rank's.
        """
        return 0

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to be a trainer's callback: transformers calls this of each when a trainer is made."""
        made = f"{type(self).__name__}(...)"
        raise UserError(
            f"{type(self).__name__} is a probe, no callback: attach(trainer, FOLDER, [{made}]), not callbacks="
        )

    on_train_begin = on_init_end  # of one that is added later
