"""What all probes together require of the engine: what to keep, folds, the entropy gradient, memory; and what of it a
training's configuration will measure and will not, said once when it begins."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_training.engine.probe import Probe
from rl_training.engine.recorder import LoopSpec, StepShape
from rl_training.engine.timing import SHARED
from rl_training.errors import UserError
from rl_training.gradients.folds import DEFAULT_NUM_FOLDS, FoldGroup, plan_folds, plan_prompt_folds
from rl_training.optim.adamw import AdamWState
from rl_training.optim.state import view_optimizer
from rl_training.parallel.sharding import Shard, dtype_name
from rl_training.statistics.estimate import MIN_FOLDS_STEP
from rl_training.step.data import EntropySettings
from rl_training.step.limits import ONE_RESPONSE
from rl_training.step.needs import Need

VECTORS_BESIDE_FOLDS = 4  # of an entropy change: δθ, the one before, one entropy gradient and the sum of all

ROUNDED = (
    "steps are rounded: {which}; update/surviving_share says how much of each is left. Weights in float32, under bf16 "
    "autocast, lose nothing"
)
NO_DECAY = (
    "Adam's second moment never decays: it is kept in {dtype}, in which {beta2} times a number is that number. Where "
    "gradients become smaller, steps stay small: use adam_beta2=0.99, or weights in float32"
)


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
        names = [SHARED, *(probe.name for probe in probes)]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise UserError(f"two probes have the same name: {twice}")
        needs = needs_of(probes)
        folding = [probe for probe in probes if Need.FOLD_GRADIENTS in probe.needs]
        num_folds = _agreed({p.name: p.num_folds for p in folding if p.num_folds is not None}, "num_folds")
        entropy = _agreed({p.name: p.entropy for p in probes if p.entropy is not None}, "entropy gradient")
        dtype = _agreed({p.name: p.rows_dtype for p in folding if p.rows_dtype is not None}, "rows_dtype")
        offload = any(probe.offload for probe in folding)
        return cls(probes, needs, num_folds, entropy or EntropySettings(), offload, dtype)

    def folds(
        self,
        shape: StepShape,
        sizes: Sequence[int],
        sizes_of_ranks: Sequence[Sequence[int]] | None = None,
        responses_per_prompt: int | None = None,
        may_cut: bool = True,
    ) -> list[FoldGroup]:
        """Returns the folds of a step.

        sizes                 sequences of each microbatch of this step on this process
        sizes_of_ranks        on every process; None where they are the same
        responses_per_prompt  in this step; None: as in the shape
        may_cut               microbatches may be cut into several folds where nobody has asked for it

        ValueError, naming a number that would do, where the number that the probes ask for is impossible in a whole
        step. The last step of an epoch may be short, and where tokens are counted, steps differ in size: such a step
        has the default number where that one is impossible.
        """
        of_ranks, ranks = sizes_of_ranks or [sizes], shape.num_ranks
        group, cut = responses_per_prompt or shape.responses_per_prompt, may_cut and self.may_pass_again
        try:
            return plan_folds(sizes, group, ranks, self.num_folds, of_ranks, cut)
        except ValueError:
            if group == shape.responses_per_prompt and all([*own] == shape.sizes for own in of_ranks):
                raise
        return plan_folds(sizes, group, ranks, None, of_ranks, cut)

    def folds_and_passes(self, loop: LoopSpec) -> tuple[int, float]:
        """Return how many folds a whole step has, and which share of its own passes they take once more."""
        shape = loop.shape
        groups = self.folds(shape, shape.sizes)
        count, prompts = groups[-1].folds.stop, sum(shape.sizes) // shape.responses_per_prompt
        is_few = count < MIN_FOLDS_STEP and self.num_folds is None
        if self.may_pass_again and not loop.split_prompts and (loop.mixed_prompts or is_few) and prompts:
            anew = plan_prompt_folds(prompts, shape.num_ranks, self.num_folds)[-1].folds.stop
            if anew >= MIN_FOLDS_STEP:
                return anew, 1.0
        slices = max(1, len(groups) // shape.microbatches)
        return count, (slices - 1) / slices

    @property
    def may_pass_again(self) -> bool:
        """Whether gradients of folds are worth further passes: for a prediction, not for the noise scale alone."""
        return Need.FOLD_GRADIENTS in self.needs

    def folds_of_step(
        self, loop: LoopSpec, sizes: Sequence[int] | None, responses_per_prompt: int, may_cut: bool
    ) -> list[FoldGroup]:
        """Return the folds of a step. A collective where it has sizes of its own.

        Args:
            sizes: Sequences of each of its microbatches on this process; None: as in the loop's shape.
            may_cut: Microbatches may be cut into several folds where nobody has asked for it.
        """
        if sizes is None:
            return self.folds(loop.shape, loop.shape.sizes, None, responses_per_prompt, may_cut)
        own = torch.tensor(sizes, dtype=torch.float64, device=loop.shard.layout.device)
        # Other processes may have others, whose prompts end elsewhere.
        return self.folds(loop.shape, sizes, loop.ranks.gather(own).long().tolist(), responses_per_prompt, may_cut)

    def num_vectors(self, num_folds: int) -> int:
        """Returns how many fp32 vectors of a process's entries a measured step holds on the device."""
        by_fold = (Need.FOLD_GRADIENTS in self.needs) / (1 if self.rows_dtype is None else 2)
        rows = 0 if self.offload else math.ceil(num_folds * (by_fold + (Need.ENTROPY_ROWS in self.needs)))
        beside = VECTORS_BESIDE_FOLDS * (Need.ENTROPY_GRADIENT in self.needs)
        return rows + beside + max((probe.num_vectors(num_folds) for probe in self.probes), default=0)


def needs_of(probes: Sequence[Probe]) -> Need:
    """Returns everything that one of these probes needs."""
    return functools.reduce(operator.or_, (probe.needs for probe in probes), Need.NOTHING)


def _agreed(wanted: Mapping[str, Any], what: str) -> Any:
    """Returns what the probes ask for, None where none does. ValueError when they do not agree."""
    if len(set(wanted.values())) > 1:
        raise UserError(f"all probes share one {what}: give {list(wanted)} the same")
    return next(iter(wanted.values()), None)


def announcement(loop: LoopSpec, requirements: Requirements) -> tuple[str, list[str]]:
    """Returns what will be measured, in a sentence, and what will not and which setting would change that."""
    shape, layout, needs = loop.shape, loop.shard.layout, requirements.needs
    count, again = requirements.folds_and_passes(loop)
    vectors, size = requirements.num_vectors(count), layout.num_bytes / 1e6
    plan = (
        f"probes measure {_pluralize(count, 'fold')} of whole prompts a step, from "
        f"{_pluralize(shape.microbatches, 'microbatch')} of {shape.microbatch_size} sequences on "
        f"{'each of ' * (shape.num_ranks > 1)}{_pluralize(shape.num_ranks, 'process')}, and keep {vectors} vectors of "
        f"{size:.3g} MB on this one"
    )
    if again:
        plan += f"; these folds take {again:.0%} of a step's forward and backward passes once more"
    if loop.loss_settings is not None and loop.loss_settings.correction is not None:
        plan += f". The loss corrects for the sampler: {loop.loss_settings.correction}"
    warnings = _fold_warnings(loop, requirements, count)
    if loop.split_prompts:
        warnings = [f"no prediction, and no noise scale: {loop.split_prompts}"]
    elif loop.mixed_prompts and not again:
        warnings = [f"no prediction, and no noise scale: {loop.mixed_prompts}"]
    warnings += [f"no prediction at some steps: {loop.reused}"] if loop.reused else []
    # What is missing most stands in the first line, before all that is measured.
    sentences = [sentence for sentence in (loop.opening, *warnings[:1], plan) if sentence]
    plan = ". ".join(sentences[:1] + [sentence[0].upper() + sentence[1:] for sentence in sentences[1:]])
    missing = warnings[1:]
    if Need.ENTROPY_GRADIENT in needs:
        missing += _of_optimizer(loop.shard)
    if not loop.dr_grpo and Need.LOSS_CHECK in needs:
        missing.append(f"delta_reward/forward and the split of the noise take Dr-GRPO's loss: {loop.fixes.dr_grpo}")
    missing += [f"no entropy gradient: {ONE_RESPONSE}"] if shape.responses_per_prompt == 1 else []
    missing += [f"no entropy gradient: {loop.sampling_mismatch}"] if loop.sampling_mismatch else []
    missing += [f"rounded: {loop.shard.layer_rounding}"] if loop.shard.layer_rounding else []
    return plan, missing


def _fold_warnings(loop: LoopSpec, requirements: Requirements, count: int) -> list[str]:
    """Returns what so many folds are too few for."""
    if count >= DEFAULT_NUM_FOLDS:
        return []
    needs, more, missing = requirements.needs, loop.more_folds(requirements.probes), []
    if Need.SQ_NORMS in needs and count < 2:
        missing.append(f"no noise scale: a step is one fold, and has no scatter; use {more}")
    if Need.ENTROPY_GRADIENT in needs and count < DEFAULT_NUM_FOLDS:
        rows = ", no interventions and no token classes" if Need.ENTROPY_ROWS in needs else ""
        if count < 2:
            missing.append(f"no prediction: a step is one fold, and none can be left out of it; use {more}")
        elif count < MIN_FOLDS_STEP:
            missing.append(f"no error bars{rows}: {count} folds are too few; use {more}")
        else:
            missing.append(f"uncertain error bars: they come from {count} folds; for {DEFAULT_NUM_FOLDS} use {more}")
    return missing


def _of_optimizer(shard: Shard) -> list[str]:
    """Returns what the optimizer's step lacks, or loses to rounding."""
    optimizer = view_optimizer(shard)
    missing = [f"no prediction before the step: {optimizer.limit}"] if optimizer.limit else []
    missing += [ROUNDED.format(which=optimizer.rounded)] if optimizer.rounded else []
    adam = [state for state in (optimizer.states or {}).values() if isinstance(state, AdamWState)]
    stuck = [state for state in adam if 1.0 - state.betas[1] < torch.finfo(state.exp_avg_sq.dtype).eps / 2.0]
    missing += [NO_DECAY.format(dtype=dtype_name(state.exp_avg_sq.dtype), beta2=state.betas[1]) for state in stuck[:1]]
    return missing


def _pluralize(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what[-1] in 'hs' else 's'}"
