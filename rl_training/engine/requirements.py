"""What all probes together require of the engine: what to keep, folds, the entropy gradient, memory."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_training.engine.open_step import Shape
from rl_training.engine.probe import Need, Probe
from rl_training.engine.step import EntropySettings
from rl_training.mathematics.folds import FoldGroup, plan_folds

VECTORS_BESIDE_FOLDS = 4  # of an entropy change: δθ, the one before, one entropy gradient and the sum of all


@dataclass(frozen=True)
class Requirements:
    """What some probes require together.

    num_folds  over all processes; None for the default  offload  keep the folds' gradients in the CPU's memory
    rows_dtype  of these; None for fp32
    """

    probes: Sequence[Probe]
    needs: Need
    num_folds: int | None
    entropy: EntropySettings
    offload: bool
    rows_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> Requirements:
        """ValueError when two probes have the same name, or ask for different folds or entropy gradients."""
        twice = [name for name, count in Counter(probe.name for probe in probes).items() if count > 1]
        if twice:
            raise ValueError(f"two probes have the same name: {twice}")
        needs = needs_of(probes)
        folding = [probe for probe in probes if Need.FOLD_GRADIENTS in probe.needs]
        num_folds = _common({p.name: p.num_folds for p in folding if p.num_folds is not None}, "num_folds")
        entropy = _common({p.name: p.entropy for p in probes if p.entropy is not None}, "entropy gradient")
        dtype = _common({p.name: p.rows_dtype for p in folding if p.rows_dtype is not None}, "rows_dtype")
        offload = any(probe.offload for probe in folding)
        return cls(probes, needs, num_folds, entropy or EntropySettings(), offload, dtype)

    def folds(
        self, shape: Shape, sizes: Sequence[int], sizes_of_ranks: Sequence[Sequence[int]] | None = None
    ) -> list[FoldGroup]:
        """Returns the folds of a step.

        sizes           sequences of each microbatch of this step on this process
        sizes_of_ranks  on every process; None where they are the same

        ValueError, naming a number that would do, where the number that the probes ask for is impossible.
        """
        number = self.num_folds
        # The last step of an epoch may be short, and where tokens are counted, steps differ in size.
        if number is not None and len(sizes) != shape.microbatches and number > len(sizes):
            number = None
        return plan_folds(sizes, shape.responses_per_prompt, shape.num_ranks, number, sizes_of_ranks)

    def num_vectors(self, num_folds: int) -> int:
        """Returns how many fp32 vectors of a process's entries a measured step holds on the device."""
        by_fold = (Need.FOLD_GRADIENTS in self.needs) / (1 if self.rows_dtype is None else 2)
        rows = 0 if self.offload else math.ceil(num_folds * (by_fold + (Need.ENTROPY_ROWS in self.needs)))
        beside = VECTORS_BESIDE_FOLDS * (Need.ENTROPY_GRADIENT in self.needs)
        return rows + beside + max((probe.num_vectors(num_folds) for probe in self.probes), default=0)


def needs_of(probes: Sequence[Probe]) -> Need:
    """Returns everything that one of these probes needs."""
    return functools.reduce(operator.or_, (probe.needs for probe in probes), Need.NOTHING)


def _common(wanted: Mapping[str, Any], what: str) -> Any:
    """Returns what the probes ask for, None where none does. ValueError when they do not agree."""
    if len(set(wanted.values())) > 1:
        raise ValueError(f"all probes share one {what}: give {list(wanted)} the same")
    return next(iter(wanted.values()), None)
