"""What all probes together require of the engine: what to keep, folds, the entropy gradient, memory.

Also the announcement at the start of training: what its configuration will measure, and what it will not.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_training.engine.kl_bound import KLBound
from rl_training.engine.loop import Loop
from rl_training.engine.probe import Probe
from rl_training.engine.step_checks import StepChecks
from rl_training.entropy.data import EntropySettings
from rl_training.errors import UserError
from rl_training.optim.state import view_optimizer
from rl_training.parallel.fusion import Fusion
from rl_training.parallel.rows import rows_in_vectors
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Layout
from rl_training.policy.precision import dropout_remark
from rl_training.probe_names import ENGINE
from rl_training.statistics.estimate import MIN_FOLDS_STEP, stderr_reason
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.folds import DEFAULT_NUM_FOLDS, FoldGroup, plan_folds, plan_prompt_folds
from rl_training.step.needs import Need
from rl_training.step.reasons import ONE_RESPONSE, OTHER_LOSS
from rl_training.step.residual import ResidualTest

ROUNDED = (
    "steps are rounded: {which}; update/surviving_share says how much of each is left. Weights in float32, under bf16 "
    "autocast, lose nothing"
)


@dataclass(frozen=True)
class Requirements:
    """What several probes require together.

    Args:
        needs: Everything that at least one of them needs.
        num_folds: Number of folds over all ranks. None for the default.
        entropy: How the entropy gradient is estimated.
        offload: Keep the fold gradients in CPU memory.
        rows_dtype: Dtype of the fold gradients. None: 8 bits if they are large, otherwise exact.
        compile: Fuse passes over vectors with torch.compile. None: on a GPU, if vectors are large.
    """

    probes: Sequence[Probe]
    needs: Need
    num_folds: int | None
    entropy: EntropySettings
    offload: bool
    rows_dtype: torch.dtype | None = None
    compile: bool | None = None

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> Requirements:
        """Combine the probes' needs. UserError if two share a name, or want different folds or entropy gradients."""
        names = Counter(probe.name for probe in probes)
        duplicates = [name for name, count in names.items() if count > 1]
        if duplicates:
            raise UserError(f"two probes have the same name: {duplicates}")
        of_engine = ENGINE, ResidualTest.name, StepChecks.name, KLBound.name  # keys of its states and estimates
        reserved = [name for name in of_engine if name in names]
        if reserved:
            raise UserError(f"the name {reserved[0]} is reserved: give the probe another one")
        needs = needs_of(probes)
        fold_probes = [probe for probe in probes if Need.FOLD_GRADIENTS in probe.needs]
        num_folds = _agreed({p.name: p.num_folds for p in fold_probes if p.num_folds is not None}, "num_folds")
        entropy = _agreed({p.name: p.entropy for p in probes if p.entropy is not None}, "entropy gradient")
        dtype = _agreed({p.name: p.rows_dtype for p in fold_probes if p.rows_dtype is not None}, "rows_dtype")
        is_compiled = _agreed({p.name: p.compile for p in fold_probes if p.compile is not None}, "compile")
        offload = any(probe.offload for probe in fold_probes)
        return cls(probes, needs, num_folds, entropy or EntropySettings(), offload, dtype, is_compiled)

    def refuse_impossible_folds(self, num_prompts: int, num_ranks: int) -> None:
        """Raise UserError, naming a number that works, if steps with so many prompts per rank have too few folds."""
        if self.num_folds is None:
            return
        fitting = plan_prompt_folds(max(1, num_prompts), num_ranks, self.num_folds)[-1].folds.stop
        if fitting != self.num_folds:
            raise UserError(
                f"num_folds={self.num_folds} cannot cut {num_prompts} prompts on each of {num_ranks} processes into "
                "folds of whole prompts: "
                + (
                    f"use num_folds={fitting}"
                    if fitting > 1
                    else "leave num_folds out, and put more prompts into a step"
                )
            )

    def folds_of_full_step(self, loop: Loop) -> tuple[int, bool]:
        """Return the number of folds of a full step, and whether their gradients take further passes."""
        num_folds = self.plan(loop)[-1].folds.stop
        num_prompts = sum(loop.sizes) // loop.responses_per_prompt
        wanted = self.num_folds or MIN_FOLDS_STEP
        can_recompute = self.allows_extra_passes and not loop.reasons.split_prompts and num_prompts > 0
        if can_recompute and (self.no_whole_folds(loop) or num_folds < wanted):
            num_prompt_folds = plan_prompt_folds(num_prompts, loop.ranks.count, self.num_folds)[-1].folds.stop
            if num_prompt_folds >= min(wanted, MIN_FOLDS_STEP):
                return num_prompt_folds, True
        return num_folds, False

    def no_whole_folds(self, loop: Loop) -> Unavailable | None:
        """Return why planned folds of a full step cannot hold whole prompts, or None."""
        groups = self.plan(loop)
        has_folds_of_ranks = len(groups) == 1 < len(groups[0].folds)
        return None if has_folds_of_ranks else loop.reasons.no_whole_folds

    @property
    def allows_extra_passes(self) -> bool:
        """Whether fold gradients justify further passes: yes for a prediction, no for the noise scale alone."""
        return Need.FOLD_GRADIENTS in self.needs

    def plan(
        self, loop: Loop, sizes: Sequence[int] | None = None, responses_per_prompt: int | None = None
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

    def num_vectors(self, num_folds: int, layout: Layout) -> int:
        """Return how many vectors of this rank's entries a measured step holds on the device."""
        fold_rows = rows_in_vectors(layout, num_folds)
        holds_all = Need.ENTROPY_ROWS in self.needs or (layout.is_small and Need.ENTROPY_GRADIENT in self.needs)
        kept = fold_rows * holds_all
        if Need.FOLD_GRADIENTS in self.needs:
            kept += rows_in_vectors(layout, num_folds, self.rows_dtype)
        others = (2 if layout.is_large else 3) * (Need.ENTROPY_GRADIENT in self.needs)  # δθ, the previous one, and S
        further = max((probe.num_vectors(fold_rows) for probe in self.probes), default=0.0)
        return math.ceil((0.0 if self.offload else kept) + others + further)


def needs_of(probes: Sequence[Probe]) -> Need:
    """Return everything that at least one of these probes needs."""
    return functools.reduce(operator.or_, (probe.needs for probe in probes), Need.NOTHING)


def _agreed(wanted: Mapping[str, Any], what: str) -> Any:
    """Return the value that the probes agree on, None if none asks for one. UserError if they disagree."""
    if len(set(wanted.values())) > 1:
        raise UserError(f"all probes share one {what}: give {list(wanted)} the same")
    return next(iter(wanted.values()), None)


def announcement(loop: Loop, requirements: Requirements) -> list[str]:
    """Return the announcement at the start of training: what will be measured, what not, and how to change that."""
    layout, needs = loop.shard.layout, requirements.needs
    if not needs:
        return [loop.opening] if loop.opening else []
    num_folds, is_recomputed = requirements.folds_of_full_step(loop)
    num_vectors, vector_mb = requirements.num_vectors(num_folds, layout), layout.num_bytes / 1e6
    plan = (
        f"probes measure {_pluralize(num_folds, 'fold')} of whole prompts a step, from "
        f"{_pluralize(loop.microbatches, 'microbatch')} of {loop.microbatch_size} sequences on "
        f"{'each of ' * (loop.ranks.count > 1)}{_pluralize(loop.ranks.count, 'process')}, and keep "
        f"{num_vectors} vectors of {vector_mb:.3g} MB on this one"
    )
    if is_recomputed:
        plan += "; these folds take a step's forward passes and backwards once more"
    if loop.loss_settings is not None and loop.loss_settings.correction is not None:
        plan += f". The loss corrects for the sampler: {loop.loss_settings.correction}"
    warnings = _fold_warnings(loop, requirements, num_folds, is_recomputed=is_recomputed)
    warnings += [f"no prediction at some steps: {loop.reasons.reused}"] if loop.reasons.reused else []
    # What the folds cannot give comes first, then the host's opening, then the plan.
    sentences = [sentence for sentence in (*warnings[:1], loop.opening, plan) if sentence]
    plan = ". ".join([*sentences[:-1], plan[0].upper() + plan[1:] if len(sentences) > 1 else plan])
    remarks = [*_rounding_remarks(loop.shard, needs), *filter(None, [dropout_remark(loop.policy.model)])]
    return [plan, *warnings[1:], *_other_warnings(loop, needs), *remarks]


def _other_warnings(loop: Loop, needs: Need) -> list[str]:
    """Return what reasons other than the folds take away: what is lost, and why."""
    formula_reason = view_optimizer(loop.shard).reason if Need.ENTROPY_GRADIENT in needs else None
    is_other_loss = Need.LOSS_CHECK in needs and not loop.is_dr_grpo
    missing = [
        ("no prediction before the step", formula_reason),
        (
            "no delta_reward/forward, and no split of the noise",
            OTHER_LOSS.with_fix(loop.fixes.dr_grpo) if is_other_loss else None,
        ),
        ("no entropy gradient", ONE_RESPONSE if loop.responses_per_prompt == 1 else None),
        ("no entropy gradient", loop.reasons.sampling_mismatch),
    ]
    return [f"{what}: {reason}" for what, reason in missing if reason]


def _fold_warnings(loop: Loop, requirements: Requirements, num_folds: int, *, is_recomputed: bool) -> list[str]:
    """Return what is lost because folds are too few, or cannot hold whole prompts.

    Args:
        num_folds: Number of folds of a full step.
        is_recomputed: Fold gradients come from further passes, for which the position of prompts does not matter.
    """
    needs, probes = requirements.needs, requirements.probes
    no_folds = loop.reasons.split_prompts or (None if is_recomputed else requirements.no_whole_folds(loop))
    if no_folds:
        return [f"no prediction, and no noise scale: {no_folds}"]
    predicts = Need.ENTROPY_GRADIENT in needs
    if num_folds < 2:
        missing = ["no prediction"] * predicts + ["no noise scale"] * (Need.SQ_NORMS in needs)
        return [f"{', '.join(missing)}: {loop.one_fold_reason(probes)}"] if missing else []
    if not predicts or num_folds >= DEFAULT_NUM_FOLDS:
        return []
    no_stderr = stderr_reason(num_folds)
    if no_stderr is None:
        more = loop.more_folds_fix(probes)
        return [f"uncertain error bars: they come from {num_folds} folds; for {DEFAULT_NUM_FOLDS} use {more}"]
    missing_too = "no interventions, no token classes, " * (Need.ENTROPY_ROWS in needs)
    return [f"{missing_too}{no_stderr.with_fix(f'use {loop.more_folds_fix(probes)}')}"]


def _rounding_remarks(shard: Shard, needs: Need) -> list[str]:
    """Return remarks on what steps and passes lose to rounding."""
    remarks = []
    if Need.ENTROPY_GRADIENT in needs:
        optimizer = view_optimizer(shard)
        remarks += [ROUNDED.format(which=optimizer.rounding_reason)] if optimizer.rounding_reason else []
        remarks += [state.remark for state in (optimizer.states or {}).values() if state.remark][:1]
    return remarks + ([f"rounded: {shard.layer_rounding}"] if shard.layer_rounding else [])


def _pluralize(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what[-1] in 'hs' else 's'}"
