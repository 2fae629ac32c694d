"""Reads TRL's settings: of the loss, as the engine knows them, and what they mean for prompts and rollouts."""

from __future__ import annotations

import math
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from rl_training.hosts.trl.members import FORWARD_PASS
from rl_training.hosts.trl.versions import of_trainer, setting
from rl_training.parallel.ranks import all_ranks
from rl_training.step.batch import Correction, LossSettings
from rl_training.step.folds import DEFAULT_NUM_FOLDS
from rl_training.step.reasons import Fixes

# The settings of Dr-GRPO's loss: no division by a group's standard deviation or by a length, no other term, no mask.
DR_GRPO: dict[str, Any] = {
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "multi_objective_aggregation": "sum_then_normalize",
    "beta": 0.0,
    "importance_sampling_level": "token",
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "delta": None,
    "off_policy_mask_threshold": None,
}


def loss_settings(trainer: GRPOTrainer) -> LossSettings:
    """Return the settings of TRL's loss, without interventions on it."""
    return LossSettings(
        max_length=trainer.max_completion_length,
        epsilon_low=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        hides_truncated=trainer.mask_truncated_completions,
        correction=_correction(trainer),
        differs=frozenset(name for name, value in DR_GRPO.items() if setting(trainer.args, name) != value),
    )


def _correction(trainer: GRPOTrainer) -> Correction | None:
    """Return TRL's correction for the difference between vLLM's policy and the trainer's, or None."""
    if not trainer.use_vllm or not trainer.vllm_importance_sampling_correction:
        return None
    level, kind = trainer.vllm_importance_sampling_mode.split("_")
    low, high = (of_trainer(trainer, f"vllm_importance_sampling_clip_{end}") for end in ("min", "max"))
    bounds = 0.0 if low is None else low, math.inf if high is None else high
    return Correction(level == "sequence", kind == "mask", *bounds)


def fixes(settings: LossSettings, *, is_cli: bool = False) -> Fixes:
    """Return the advice that makes more of a training with these loss settings measurable.

    Args:
        settings: The settings of the loss.
        is_cli: Whether to write settings as on the command line, trainer.NAME=VALUE, instead of as Python.
    """
    own_pass = f"build on super().compute_loss, or take log-probabilities from self.{FORWARD_PASS}"
    changes = {name: value for name, value in DR_GRPO.items() if name in settings.differs}
    changes |= {"mask_truncated_completions": False} if settings.hides_truncated else {}
    changes |= {"vllm_importance_sampling_correction": False} if settings.correction is not None else {}
    if is_cli:
        arguments = [f"trainer.{name}={_as_argument(value)}" for name, value in changes.items()]
        arguments += ["intervention=null"] * ("intervention" in settings.differs)
        return Fixes(
            dr_grpo=f"set {' '.join(arguments)}" if arguments else "",
            batch_setting="batch.microbatch_size={size} batch.sequences_per_step={sequences}",
            steps_setting="batch.sequences_per_step={sequences}",
            num_folds_setting="probes.{name}.num_folds={folds}",
            own_forward_pass=own_pass,
        )
    settings_to_change = [f"{name}={value!r}" for name, value in changes.items()]
    settings_to_change += ["no intervention"] * ("intervention" in settings.differs)
    return Fixes(
        dr_grpo=f"set {', '.join(settings_to_change)}" if settings_to_change else "",
        batch_setting="per_device_train_batch_size={size}, gradient_accumulation_steps={count} in GRPOConfig",
        steps_setting="gradient_accumulation_steps={count} in GRPOConfig",
        num_folds_setting="{probe}(num_folds={folds})",
        own_forward_pass=own_pass,
    )


def _as_argument(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def whole_prompts_fix(trainer: GRPOTrainer) -> str:
    """Return the advice that keeps the responses to a prompt together, for a trainer whose batches TRL shuffles.

    If a step has too few prompts for error bars, the advice includes settings that give it enough.
    """
    args, group = trainer.args, trainer.num_generations
    size, count = args.per_device_train_batch_size, args.gradient_accumulation_steps
    settings = []
    if size * count % group or size * args.steps_per_generation % group:
        size = -(-size // group) * group
        settings.append(f"per_device_train_batch_size={size}")
    shared = math.gcd(size, group)  # group // shared microbatches hold whole prompts
    enough = math.ceil(DEFAULT_NUM_FOLDS / (size // shared * all_ranks().count)) * (group // shared)
    if count < enough:
        count = enough
        settings.append(f"gradient_accumulation_steps={count}")
    fix = "attach(trainer, ..., whole_prompts=True)"
    if settings:
        fix += f" and {', '.join(settings)} in GRPOConfig"
    # Unless it is set, steps_per_generation follows gradient_accumulation_steps.
    follows_accumulation = args.steps_per_generation == args.gradient_accumulation_steps
    if count % args.steps_per_generation and not follows_accumulation:
        fix += ", which changes which responses of a generation each step learns from"
    return fix


def whole_prompts_only_reorder(trainer: GRPOTrainer) -> bool:
    """Return whether keeping prompts whole changes only the order in which a step's microbatches are summed.

    With dropout, it also changes which mask each response gets, which is equally valid. If False, it would change
    which responses a step learns from, or a quantity that the loss averages within a microbatch.
    """
    args = trainer.args
    methods = ("compute_loss", "_compute_loss")
    is_trl_loss = all(getattr(type(trainer), name) is getattr(GRPOTrainer, name) for name in methods)
    averages_within_microbatch = (
        trainer.loss_type == "bnpo"
        or bool(setting(args, "entropy_coef"))
        or setting(args, "use_adaptive_entropy")
        or args.top_entropy_quantile < 1.0
        or of_trainer(trainer, "aux_loss_enabled")
    )
    has_whole_generations = args.gradient_accumulation_steps % args.steps_per_generation == 0
    counts = (args.gradient_accumulation_steps, args.steps_per_generation)
    fits = all(args.per_device_train_batch_size * count % trainer.num_generations == 0 for count in counts)
    return has_whole_generations and fits and is_trl_loss and not averages_within_microbatch


def steps_per_rollout(args: GRPOConfig) -> int:
    """Return the number of optimizer steps after which a rollout is used up.

    Until then TRL holds sampled sequences that its checkpoints do not save, so training cannot be resumed exactly.
    """
    microbatches = args.steps_per_generation * args.num_iterations
    return math.lcm(microbatches, args.gradient_accumulation_steps) // args.gradient_accumulation_steps
