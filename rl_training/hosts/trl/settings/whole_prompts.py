"""Whole prompts: the responses to a prompt in consecutive rows, which TRL otherwise shuffles over a rollout."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from rl_training.errors import UserError
from rl_training.hosts.trl.members import SHUFFLE
from rl_training.hosts.trl.versions import of_trainer, setting
from rl_training.hosts.trl.wrapping import wrap
from rl_training.parallel.ranks import all_ranks
from rl_training.step.folds import DEFAULT_NUM_FOLDS


def prepare_whole_prompts(prepare_inputs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call TRL's `_prepare_inputs`, which then leaves a rollout in its original order.

    The random numbers of TRL's shuffle are drawn, so that those of training stay the same.
    """
    with ExitStack() as undo:
        wrap(grpo_trainer, SHUFFLE, _draw_without_shuffling, undo)
        return prepare_inputs(*args, **kwargs)


def _draw_without_shuffling(shuffle: Callable[[dict], dict], generation_batch: dict) -> dict:
    shuffle(generation_batch)
    return generation_batch


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


def refuse_split_prompts(trainer: GRPOTrainer) -> None:
    """Raise UserError if an optimizer step or a generation of one rank does not hold whole prompts."""
    args = trainer.args
    group = trainer.num_generations
    size = args.per_device_train_batch_size
    counts = {"an optimizer step": args.gradient_accumulation_steps, "a generation": args.steps_per_generation}
    for what, count in counts.items():
        if size * count % group:
            raise UserError(
                f"{what} has {count} x {size} sequences on a process, no multiple of num_generations={group}: it "
                "cannot hold all responses of its prompts. Use "
                f"per_device_train_batch_size={-(-size // group) * group}"
            )


def whole_prompts_fix(trainer: GRPOTrainer) -> str:
    """Return the advice that keeps the responses to a prompt together, for a trainer whose batches TRL shuffles.

    If a step has too few prompts for error bars, the advice includes settings that give it enough.
    """
    args = trainer.args
    group = trainer.num_generations
    size = args.per_device_train_batch_size
    count = args.gradient_accumulation_steps
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
