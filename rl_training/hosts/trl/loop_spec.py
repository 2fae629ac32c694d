"""Describes a trainer to the engine, which treats it like any other loop."""

from __future__ import annotations

import dataclasses

from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.loss_info import OTHER_TERMS
from rl_training.hosts.trl.measured_trainer import MeasuredTrainer
from rl_training.hosts.trl.settings.fixes import fixes_of
from rl_training.hosts.trl.settings.rollout_shape import steps_per_rollout
from rl_training.hosts.trl.settings.sampling import fresh_responses_reason, sampling_reason
from rl_training.hosts.trl.settings.whole_prompts import whole_prompts_fix
from rl_training.hosts.trl.sharding import shard_of
from rl_training.hosts.trl.versions import of_trainer
from rl_training.parallel.ranks import all_ranks
from rl_training.step.reasons import MIXED_PROMPTS, REUSED, SPLIT_PROMPTS, Reasons


def loop_spec_of(measured: MeasuredTrainer, opening: str) -> LoopSpec:
    """Return what the driver must know about a training that is about to begin.

    Args:
        measured: The trainer.
        opening: The first line of what is announced when training begins.
    """
    trainer, policy, settings = measured.trainer, measured.policy, measured.loss.settings
    spelling, whole_prompts = measured.options.spelling, measured.options.whole_prompts
    args = trainer.args
    fixes = fixes_of(settings, spelling)
    is_reused = args.num_iterations > 1 and steps_per_rollout(args) > 1
    if args.num_iterations > 1:
        no_reuse = spelling.setting("num_iterations", 1) + spelling.in_config
        fixes = dataclasses.replace(fixes, no_reuse=no_reuse)
    if not whole_prompts:
        fixes = dataclasses.replace(fixes, whole_prompts=whole_prompts_fix(trainer))
    is_shuffled = not whole_prompts and args.steps_per_generation > 1
    is_split = is_shuffled and args.gradient_accumulation_steps % args.steps_per_generation > 0
    return LoopSpec(
        responses_per_prompt=trainer.num_generations,
        microbatch_size=args.per_device_train_batch_size,
        microbatches=args.gradient_accumulation_steps,
        shard=shard_of(trainer),
        policy=policy,
        ranks=all_ranks(),
        has_other_loss=not settings.is_dr_grpo,
        loss_settings=settings,
        reasons=Reasons(
            no_folds=MIXED_PROMPTS.with_fix(fixes.whole_prompts) if is_shuffled else None,
            split_prompts=SPLIT_PROMPTS.with_fix(fixes.whole_prompts) if is_split else None,
            reused=REUSED.with_fix(fixes.no_reuse) if is_reused else None,
            other_policy=sampling_reason(trainer, policy.scorer.temperature),
            cannot_sample=fresh_responses_reason(trainer),
            other_terms=OTHER_TERMS if of_trainer(trainer, "aux_loss_enabled") else None,
        ),
        fixes=fixes,
        opening=opening,
    )
