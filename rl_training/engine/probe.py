"""What a probe is: settings, and pure functions from a step and a state to a reading.

    init()                       the state at the start of a training run
    measure(ctx, state)          gradients are complete, averaged over ranks and unclipped; parameters are still old
    after_step(ctx, reading)     optional: parameters and optimizer have moved, unless the loop skipped the step

On each optimizer step that a probe measures, `measure` and `after_step` are called on every rank. The driver owns the
states. A reading with predictions has its state kept only after the step has been verified: if the optimizer did not
follow its formula, the predictions become nan and the state that came with them is dropped. If a reading predicts
nothing, its state is kept at once, so that two states need not be in memory during the optimizer's step.

A probe must not change training: no `.backward()`, no writes to parameters, gradients or optimizer states. If it cannot
measure something, it returns `Estimate.missing(reason)` under that name and never leaves the name out. CONTRIBUTING.md
lists what a new shipped probe has beside its class: a YAML in conf/probe, rows in the documentation and a test.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_training.engine.context import StepContext
from rl_training.entropy.data import EntropySettings
from rl_training.options import check_whole, refuse_other_arguments
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.needs import Need


@dataclass(frozen=True)
class Reading:
    """What a probe reports about one step.

    A probe may subclass it and add fields that pass data from `measure` to `after_step`. They are discarded with the
    step.
    """

    # by metric; valid only if the step follows the optimizer's formula
    predicted: Mapping[str, Estimate] = field(default_factory=dict)
    measured: Mapping[str, Estimate] = field(default_factory=dict)  # by metric; valid for any step
    state: Any = None  # for the next step that this probe measures

    @property
    def estimates(self) -> dict[str, Estimate]:
        """All estimates, by metric."""
        return {**self.measured, **self.predicted}

    def without_predictions(self, reason: Unavailable) -> Reading:
        """Return this reading with every prediction replaced by nan and this reason, for a step off the formula."""
        return dataclasses.replace(self, predicted=dict.fromkeys(self.predicted, Estimate.missing(reason)))


class Probe(ABC):
    """A measurement that runs inside a training loop. An object holds settings only; the driver holds the state.

    Attributes:
        name: Names it in probes.jsonl and in probe_cost/<name>_seconds.
        needs: What the engine must keep for it.
        every: Measure every `every`-th step, starting with the first.
        num_folds: With FOLD_GRADIENTS: number of whole-prompt folds over all ranks. None for the default of 8 or
            slightly more.
        scores_responses: Whether it may score the step's responses with `ctx.scores_reason` or `ctx.sampling_reason`.
            Such probes measure first, because all others are told what the scores show.
        takes_num_folds: Whether `num_folds` is an argument of its class, which advice on more folds can then name.
        offload: With FOLD_GRADIENTS: keep the fold gradients in CPU memory.
        fold_dtype: With FOLD_GRADIENTS: dtype in which they are kept: torch.float32 (fp64 if the weights are fp64),
            torch.bfloat16 or torch.int8. None: int8 if they are large, otherwise exact.
        compile: With FOLD_GRADIENTS: fuse passes over vectors with torch.compile. None: on a GPU, if vectors are large.
        entropy: With ENTROPY_…: how the entropy gradient is estimated. None to use another probe's setting or the
            default.
    """

    name: str
    needs: Need = Need.NOTHING
    scores_responses: bool = False
    num_folds: int | None = None
    takes_num_folds: bool = False
    offload: bool = False
    fold_dtype: torch.dtype | None = None
    compile: bool | None = None
    entropy: EntropySettings | None = None
    every: int = 1  # also for a class whose own __init__ does not call this one

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse an option that the probe does not have, with the closest one that it has."""
        refuse_other_arguments(cls.__init__, cls.__name__, kwargs)
        return super().__new__(cls)

    def __init__(self, every: int = 1) -> None:
        check_whole(f"{self.name}: every", every, 1, " (measure each `every`-th step)")
        self.every = every

    def init(self) -> Any:
        """Return the state at the start of a training run. None: the probe remembers nothing between steps.

        A state is a tensor, a number, a ShardedVector, or a frozen dataclass or dictionary of such values. Checkpoints
        store it, so a resumed run continues as if it had never stopped. It is identical on all ranks, except for
        ShardedVectors.
        """
        return None

    @abstractmethod
    def measure(self, ctx: StepContext, state: Any) -> Reading:
        """Return what can be said about the step before it is taken, and the state for the next measured step."""

    def after_step(self, ctx: StepContext, reading: Reading) -> Reading:
        """Return the final reading once the step has been taken: what `measure` returned, plus anything new."""
        return reading

    def measures_at(self, number: int) -> bool:
        """Return whether this probe measures this optimizer step, counted from 1."""
        return (number - 1) % self.every == 0

    @property
    def interval(self) -> str:
        """Which steps it measures, after its name in the announcement; "" for all."""
        return "" if self.every == 1 else f" every {self.every} steps"

    def num_vectors(self, fold_vectors: float) -> float:
        """Return how many fp32 vectors of all trained parameters it holds on the device while it measures a step.

        Vectors that the engine keeps for it are not counted. `fold_vectors` is how many a vector for each fold takes:
        the number of folds, or a quarter of it in 8 bits.
        """
        return 0.0

    if not TYPE_CHECKING:  # or any name would be an attribute to a type checker

        def __getattr__(self, name: str) -> Any:
            """Say where a probe belongs, to a trainer that was given one as a callback."""
            raise AttributeError(
                f"{type(self).__name__} has no {name}: a probe is no callback. Give it to attach or measured_loop, "
                f"as in attach(trainer, FOLDER, [{type(self).__name__}(...)])"
            )


def needs_of(probes: Sequence[Probe]) -> Need:
    """Return everything that at least one of these probes needs."""
    return functools.reduce(operator.or_, (probe.needs for probe in probes), Need.NOTHING)
