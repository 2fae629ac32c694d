"""The base class of every probe: when it is called, what it must return, and what it may ask to be kept for it.

A probe has two hooks on each optimizer step that it measures, called on every rank, and then returns its estimates:

    prepare(ctx)        all gradients are in, averaged over ranks, not clipped; the parameters are still old
    after_step(ctx)     parameters and optimizer states have moved
    results()           name → Estimate

It must change nothing of training: no `.backward()`, no write to parameters, gradients or states. What it cannot
measure it answers with `Estimate.missing(reason)`, never by leaving the name out. A new probe is one such class in
one file, a three-line YAML in conf/probe and a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.errors import UserError
from rl_training.options import check_whole
from rl_training.statistics.estimate import Estimate
from rl_training.step.data import EntropySettings
from rl_training.step.needs import Need


class Probe:
    """A measurement that runs inside a training loop. Subclasses override the hooks that they need.

    name        names it in probes.jsonl and in probe_cost/<name>_seconds
    needs       what must be kept for it
    every       measure each `every`-th step, the first one included
    num_folds   with FOLD_GRADIENTS: folds of whole prompts, over all processes; None for the default, 8 or some more
    offload     with FOLD_GRADIENTS: keep them in the CPU's memory
    rows_dtype  with FOLD_GRADIENTS: keep them in it; None for fp32, or fp64 where the weights have it
    entropy     with ENTROPY_…: how the entropy gradient is estimated; None for what another probe says, or default
    measured    prefixes of the metrics that do not depend on what the optimizer's step is
    running     averages over steps, with state_dict and load_state_dict, which a checkpoint keeps, and which begin anew
                when they load nothing; None: none
    """

    name: str
    needs: Need = Need.NOTHING
    num_folds: int | None = None
    offload: bool = False
    rows_dtype: torch.dtype | None = None
    entropy: EntropySettings | None = None
    measured: tuple[str, ...] = ()
    running: Any = None

    def __init__(self, every: int = 1) -> None:
        check_whole(f"{self.name}: every", every, 1, " (measure each `every`-th step)")
        self.every = every
        self._answers: dict[str, Estimate] = {}

    def measures_at(self, number: int) -> bool:
        """Return whether this probe measures at this optimizer step, counted from 1."""
        return (number - 1) % self.every == 0

    def reset(self) -> None:
        """Forget earlier trainings: called when one begins, before the state of a checkpoint is loaded.

        A probe that keeps more than `running` between steps forgets that here, too.
        """
        self._answers = {}
        if self.running is not None:
            self.running.load_state_dict({})

    def prepare(self, ctx: StepContext) -> None:
        """Measure what takes the old parameters."""

    def after_step(self, ctx: StepContext) -> None:
        """Measure what takes the new parameters."""

    def discard(self, reason: str) -> None:
        """Make the step's predictions nan with this reason: the step was not what they were made for."""
        missing = Estimate.missing(reason)
        self._answers = {name: e if name.startswith(self.measured) else missing for name, e in self._answers.items()}

    def results(self) -> dict[str, Estimate]:
        """Return the step's estimates by metric name: what the hooks have stored in `_answers`."""
        return self._answers

    def checked_results(self, number: int) -> dict[str, Estimate]:
        """Return what the probe says of this step. ValueError when that is nothing."""
        estimates = self.results()
        if not isinstance(estimates, Mapping) or not all(isinstance(e, Estimate) for e in estimates.values()):
            raise UserError(f"probe {self.name!r}: results must return Estimates by name, and returned {estimates!r}")
        if not estimates:
            raise UserError(f"probe {self.name!r} returned nothing at step {number}: return nan with a reason instead")
        return dict(estimates)

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

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed run needs to go on as if never stopped, the same on every rank."""
        return {} if self.running is None else self.running.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` returned."""
        if self.running is not None:
            self.running.load_state_dict(state)
        elif state:
            raise UserError(f"{self.name}: the checkpoint holds state {sorted(state)} that this probe does not have")
