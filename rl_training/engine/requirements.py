"""What all probes together require of the engine: what to keep, folds, the entropy gradient, memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from rl_training.engine.fold_placement import choose_folds, may_recompute, num_folds_in
from rl_training.engine.fold_recorder import passes_through
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.probe import Probe, needs_of
from rl_training.engine.step_checks import StepChecks
from rl_training.entropy.data import EntropySettings
from rl_training.errors import UserError
from rl_training.parallel.fold_vectors import equivalent_vectors, fold_dtype
from rl_training.parallel.fusion import Fusion
from rl_training.parallel.vectors import Layout
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.folds import FoldGroup, FoldSource, plan_folds, plan_prompt_folds
from rl_training.step.needs import Need
from rl_training.step.residual import ResidualTest
from rl_training.vocabulary import ENGINE, KL_BOUND

Setting = TypeVar("Setting")


@dataclass(frozen=True)
class Requirements:
    """What several probes require together.

    Args:
        probes: All probes of the training.
        needs: Everything that at least one of them needs.
        num_folds: Number of folds over all ranks. None for the default.
        entropy: How the entropy gradient is estimated.
        offload: Keep the fold gradients in CPU memory.
        fold_dtype: Dtype of the fold gradients. None: 8 bits if they are large, otherwise exact.
        compile: Fuse passes over vectors with torch.compile. None: on a GPU, if vectors are large.
    """

    probes: Sequence[Probe]
    needs: Need
    num_folds: int | None
    entropy: EntropySettings
    offload: bool
    fold_dtype: torch.dtype | None = None
    compile: bool | None = None

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> Requirements:
        """Combine the probes' needs. UserError if two share a name, or want different folds or entropy gradients."""
        names = Counter(probe.name for probe in probes)
        duplicates = [name for name, count in names.items() if count > 1]
        if duplicates:
            raise UserError(f"two probes have the same name: {duplicates}")
        names_of_engine = (ENGINE, ResidualTest.name, StepChecks.name, KL_BOUND)  # keys of its states and estimates
        reserved = [name for name in names_of_engine if name in names]
        if reserved:
            raise UserError(f"the name {reserved[0]} is reserved: give the probe another one")
        needs = needs_of(probes)
        fold_probes = [probe for probe in probes if Need.FOLD_GRADIENTS in probe.needs]
        return cls(
            probes,
            needs,
            num_folds=_agreed("num_folds", fold_probes, lambda probe: probe.num_folds),
            entropy=_agreed("entropy gradient", probes, lambda probe: probe.entropy) or EntropySettings(),
            offload=any(probe.offload for probe in fold_probes),
            fold_dtype=_agreed("fold_dtype", fold_probes, lambda probe: probe.fold_dtype),
            compile=_agreed("compile", fold_probes, lambda probe: probe.compile),
        )

    def refuse_impossible_folds(self, num_prompts: int, num_ranks: int) -> None:
        """Raise UserError, naming a number that works, if steps with so many prompts per rank have too few folds."""
        if self.num_folds is None:
            return
        fitting = num_folds_in(plan_prompt_folds(max(1, num_prompts), num_ranks, self.num_folds))
        if fitting != self.num_folds:
            advice = f"use num_folds={fitting}"
            if fitting < 2:
                advice = "leave num_folds out, and put more prompts into a step"
            raise UserError(
                f"num_folds={self.num_folds} cannot cut {num_prompts} prompts on each of {num_ranks} processes into "
                f"folds of whole prompts: {advice}"
            )

    def folds_of_full_step(self, loop: LoopSpec) -> tuple[int, bool]:
        """Return the number of folds of a full step, and whether further passes give their gradients."""
        folds, source = choose_folds(
            self.plan(loop),
            lambda: max(1, loop.num_prompts),
            loop.ranks.count,
            self.num_folds,
            plan_fails=self.no_planned_folds(loop) is not None,
            can_recompute=may_recompute(self.needs, loop.reasons) and loop.num_prompts > 0,
        )
        return num_folds_in(folds), source is FoldSource.RECOMPUTED

    def no_planned_folds(self, loop: LoopSpec) -> Unavailable | None:
        """Return the reason why planned folds of a full step cannot hold whole prompts, or None."""
        fold_groups = self.plan(loop)
        has_folds_of_ranks = len(fold_groups) == 1 < len(fold_groups[0].folds)
        return None if has_folds_of_ranks else loop.reasons.no_folds

    def plan(
        self, loop: LoopSpec, sizes: Sequence[int] | None = None, responses_per_prompt: int | None = None
    ) -> list[FoldGroup]:
        """Return the folds that the microbatches of a step give. Collective if `sizes` is given.

        Args:
            loop: The training loop.
            sizes: Sequences of each microbatch on this rank. None for a full step.
            responses_per_prompt: G. None for the loop's.
        """
        sizes_of_ranks = None
        if sizes is not None:  # other ranks may have other sizes, whose prompts end elsewhere
            local_sizes = torch.tensor(sizes, dtype=torch.float64, device=loop.shard.layout.device)
            sizes_of_ranks = loop.ranks.gather(local_sizes).long().tolist()
        return plan_folds(
            sizes or loop.sizes,
            responses_per_prompt or loop.responses_per_prompt,
            loop.ranks.count,
            self.num_folds,
            sizes_of_ranks,
            loop.shard.prefers_rank_folds,
        )

    def fusion(self, layout: Layout) -> Fusion:
        """Return what runs functions of the layout's vectors."""
        is_default = layout.device.type == "cuda" and layout.is_large
        return Fusion(is_default if self.compile is None else self.compile)

    def num_vectors(self, loop: LoopSpec) -> float:
        """Return how many vectors of this rank's entries a full step holds on the device, rounded up to tenths."""
        layout = loop.shard.layout
        num_folds, _ = self.folds_of_full_step(loop)
        fold_vectors = equivalent_vectors(layout, num_folds)
        num_denominators = 1 + self.entropy.per_sequence
        has_gradient = Need.ENTROPY_GRADIENT in self.needs
        kept = 0.0
        if has_gradient and layout.is_small:
            kept += num_denominators * fold_vectors
        elif Need.FOLD_ENTROPY_GRADIENTS in self.needs:
            kept += fold_vectors
        if Need.FOLD_GRADIENTS in self.needs:
            kept += equivalent_vectors(layout, num_folds, self.fold_dtype)
        others = self._num_passing(loop)
        if has_gradient:
            others += num_denominators + (1 if layout.is_large else 2)  # S, the previous δθ, and δθ unless it is large
        if Need.SQ_NORMS in self.needs:
            others += 1  # √P of Adam's metric
        further = max((probe.num_vectors(fold_vectors) for probe in self.probes), default=0.0)
        return math.ceil(10.0 * ((0.0 if self.offload else kept) + others + further)) / 10.0

    def _num_passing(self, loop: LoopSpec) -> int:
        """Return how many vectors are only passing through while the loop's backwards make them."""
        if not self.needs & (Need.FOLD_GRADIENTS | Need.SQ_NORMS):
            return 0
        layout = loop.shard.layout
        stores_vectors = Need.FOLD_GRADIENTS in self.needs
        is_rounded = fold_dtype(layout, self.fold_dtype).itemsize < layout.dtype.itemsize
        fold_groups = self.plan(loop)
        sizes = [len(part.folds) for part in fold_groups if passes_through(part, stores_vectors, is_rounded)]
        return max(sizes, default=0)


def _agreed(what: str, probes: Sequence[Probe], setting: Callable[[Probe], Setting | None]) -> Setting | None:
    """Return the setting that the probes agree on, None if none asks for one. UserError if they disagree."""
    wanted = {probe.name: value for probe in probes if (value := setting(probe)) is not None}
    if len(set(wanted.values())) > 1:
        raise UserError(f"all probes share one {what}: give {list(wanted)} the same")
    return next(iter(wanted.values()), None)
