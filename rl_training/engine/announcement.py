"""The announcement at the start of training: what its configuration will measure, and what it will not."""

from __future__ import annotations

from rl_training.engine.fold_advice import more_folds_fix, one_fold_reason
from rl_training.engine.fold_placement import may_recompute
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.requirements import Requirements
from rl_training.entropy.reward_gradient import OTHER_LOSS
from rl_training.optim.state import view_optimizer
from rl_training.parallel.sharding import Shard
from rl_training.policy.dropout import dropout_remark
from rl_training.statistics.jackknife import stderr_reason
from rl_training.step.folds import DEFAULT_NUM_FOLDS
from rl_training.step.needs import Need
from rl_training.step.reasons import ONE_RESPONSE

ROUNDED = (
    "steps are rounded: {which}; update/surviving_share says how much of each is left. Weights in float32, under bf16 "
    "autocast, lose nothing"
)
OF_SCORES = ". If the loss has a term besides log-probabilities and entropies, folds follow microbatches instead"


def announcement(loop: LoopSpec, requirements: Requirements) -> list[str]:
    """Return the announcement at the start of training: what will be measured, what not, and how to change that."""
    needs = requirements.needs
    if not needs:
        return [loop.opening] if loop.opening else []
    num_folds, is_recomputed = requirements.folds_of_full_step(loop)
    reused = loop.reasons.reused
    warnings = [
        _fold_warning(loop, requirements, num_folds, is_recomputed=is_recomputed),
        f"no prediction at some steps: {reused}" if reused else "",
    ]
    warnings = [warning for warning in warnings if warning]
    plan = _plan(loop, requirements, num_folds, is_recomputed=is_recomputed)
    # What cannot be measured comes first, then the host's opening, then the plan.
    before_plan = [sentence for sentence in (*warnings[:1], loop.opening) if sentence]
    if before_plan:
        plan = ". ".join([*before_plan, plan[0].upper() + plan[1:]])
    remarks = [*_rounding_remarks(loop.shard, needs), dropout_remark(loop.policy.model)]
    lines = [plan, *warnings[1:], *_other_warnings(loop, needs), *remarks]
    return [line for line in lines if line]


def _plan(loop: LoopSpec, requirements: Requirements, num_folds: int, *, is_recomputed: bool) -> str:
    """Return what a full step is measured in, and what that costs."""
    layout = loop.shard.layout
    least = min(loop.sizes)
    most = max(loop.sizes)
    sizes = f"{least}" if least == most else f"{least} to {most}"
    processes = _pluralize(loop.ranks.count, "process")
    plan = (
        f"probes measure {_pluralize(num_folds, 'fold')} of whole prompts a step, from "
        f"{_pluralize(loop.microbatches, 'microbatch')} of {sizes} sequences on "
        f"{processes if loop.ranks.count == 1 else f'each of {processes}'}, and keep "
        f"{requirements.num_vectors(loop):g} vectors of {layout.num_bytes / 1e6:.3g} MB on this one"
    )
    if is_recomputed:
        plan += f"; these folds take a step's forward passes and backwards once more{OF_SCORES}"
    if loop.loss_settings is not None and loop.loss_settings.correction is not None:
        plan += f". The loss corrects for the sampler: {loop.loss_settings.correction}"
    return plan


def _other_warnings(loop: LoopSpec, needs: Need) -> list[str]:
    """Return what reasons other than the folds take away: what is lost, and why."""
    formula_reason = view_optimizer(loop.shard).reason if Need.ENTROPY_GRADIENT in needs else None
    other_loss = loop.reasons.other_terms or (OTHER_LOSS.with_fix(loop.fixes.dr_grpo) if loop.has_other_loss else None)
    missing = [
        ("no prediction before the step", formula_reason),
        ("no delta_reward/forward, and no split of the noise", other_loss if Need.TERMS_CHECK in needs else None),
        ("no entropy gradient", ONE_RESPONSE if loop.responses_per_prompt == 1 else None),
        ("no entropy gradient", loop.reasons.sampling_mismatch),
    ]
    return [f"{what}: {reason}" for what, reason in missing if reason]


def _fold_warning(loop: LoopSpec, requirements: Requirements, num_folds: int, *, is_recomputed: bool) -> str:
    """Return what is lost because the folds of a full step are too few, or cannot hold whole prompts; "" if nothing."""
    needs = requirements.needs
    # For further passes the position of prompts does not matter.
    reason = loop.reasons.split_prompts or (None if is_recomputed else requirements.no_planned_folds(loop))
    if reason:
        return f"no prediction, and no noise scale: {reason}"
    can_recompute = may_recompute(needs, loop.reasons)
    if num_folds < 2:
        missing = [
            what
            for what, need in (("no prediction", Need.ENTROPY_GRADIENT), ("no noise scale", Need.SQ_NORMS))
            if need in needs
        ]
        reason = one_fold_reason(loop, requirements.probes, can_recompute=can_recompute)
        return f"{', '.join(missing)}: {reason}" if missing else ""
    if Need.ENTROPY_GRADIENT not in needs or num_folds >= DEFAULT_NUM_FOLDS:
        return ""
    more = more_folds_fix(loop, requirements.probes, can_recompute=can_recompute)
    no_stderr = stderr_reason(num_folds)
    if no_stderr is None:
        return f"uncertain error bars: they come from {num_folds} folds; for {DEFAULT_NUM_FOLDS} use {more}"
    warning = f"{no_stderr.with_fix(f'use {more}')}"
    return f"no interventions, no token classes, {warning}" if Need.FOLD_ENTROPY_GRADIENTS in needs else warning


def _rounding_remarks(shard: Shard, needs: Need) -> list[str]:
    """Return remarks on what steps and passes lose to rounding."""
    remarks = []
    if Need.ENTROPY_GRADIENT in needs:
        optimizer = view_optimizer(shard)
        states = optimizer.states or {}
        if optimizer.rounding_reason:
            remarks.append(ROUNDED.format(which=optimizer.rounding_reason))
        remarks += [state.remark for state in states.values() if state.remark][:1]
    if shard.layer_rounding:
        remarks.append(f"rounded: {shard.layer_rounding}")
    return remarks


def _pluralize(number: int, what: str) -> str:
    if number == 1:
        return f"{number} {what}"
    ending = "es" if what[-1] in "hs" else "s"
    return f"{number} {what}{ending}"
