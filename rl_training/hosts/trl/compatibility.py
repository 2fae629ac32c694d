"""Errors of `attach`: an unknown TRL version, and settings under which probes corrupt training or measure nothing.

If a version lacks a member in the tables of members.py, or its first forward pass returns something unexpected, the
error names it. A setting that only one estimate cannot handle is no error: that estimate is nan (step/reasons.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl import __version__ as trl_version
from trl.trainer import grpo_trainer

from rl_training.errors import UserError
from rl_training.hosts.devices import refuse_devices_without_float64
from rl_training.hosts.trl.members import FORWARD_PASS, METHODS, SETTINGS, SHUFFLE, TRAINER_ATTRIBUTES
from rl_training.hosts.trl.sharding import has_sharded_weights
from rl_training.hosts.trl.versions import (
    KNOWN_SETTINGS,
    OF_ARGUMENTS,
    OF_TRAINER,
    WRITTEN_FOR,
    cannot_train,
    installed_members,
    parameters_of,
    setting,
)

logger = logging.get_logger(__name__)

NAME = "GRPOTrainer"
UNSLOTH = (
    "its forward pass returns None for log-probabilities and entropies while it trains, and hidden states for logits, "
    "and its gradient checkpointing is reentrant. Train with TRL's, in a script that does not import unsloth"
)
OTHER_COPY = (
    f"nothing says that its {FORWARD_PASS} returns the log-probabilities and entropies that its loss uses. Use TRL's "
    "or a subclass of it"
)
READABLE_STAGES = (1, 2, 3)  # stages of ZeRO
FP16 = (
    "fp16 scales the loss, and with it the gradients that probes read (fp16=True, accelerate's mixed_precision: fp16, "
    "or DeepSpeed's fp16): use bf16 or fp32, or train without probes (no attach; probe=none)"
)


def is_grpo_trainer(trainer: object) -> bool:
    """Return whether this is TRL's GRPOTrainer or a subclass, whatever trl.GRPOTrainer has been replaced by."""
    return any(base.__module__ == grpo_trainer.__name__ and base.__name__ == NAME for base in type(trainer).__mro__)


def wrong_trainer_message(trainer: object) -> str:
    """Return the message for an object that is no GRPOTrainer, such as TRL's RLOOTrainer or a copy of GRPOTrainer."""
    kind = type(trainer)
    refusal = f"probes are attached to a trl.GRPOTrainer, and this is {kind.__name__}"
    if isinstance(trainer, RLOOTrainer):
        return (
            f"{refusal}. GRPOTrainer has RLOO's gradients, up to a constant factor and the KL term, with "
            "loss_type='dr_grpo', scale_rewards='none', beta=0.0"
        )
    missing = [name for name in METHODS if not hasattr(trainer, name)]
    if not missing and any(base.__name__.endswith(NAME) for base in kind.__mro__):
        is_unsloth = "unsloth" in f"{kind.__module__}.{kind.__name__}".lower()
        return f"{refusal}, a copy of it and no subclass: {UNSLOTH if is_unsloth else OTHER_COPY}"
    lacking = f", which lacks {', '.join(missing)}" if missing else ""
    return (
        f"{refusal}{lacking}. Use GRPOTrainer, with use_vllm=True for another sampler, or write the loop with "
        "measured_loop"
    )


def check_version(trainer: GRPOTrainer) -> None:
    """Raise UserError if the installed versions lack something that is read here, and name settings unknown here."""
    _refuse_missing_members(trainer)
    _warn_of_unknown_settings(trainer)


def require(holds: bool, what: str) -> None:
    """Raise UserError, saying what is wrong with the installed TRL, if a condition does not hold."""
    if not holds:
        raise UserError(f"{what} in trl {trl_version}: pip install '{WRITTEN_FOR}'")


def _refuse_missing_members(trainer: GRPOTrainer) -> None:
    """Raise UserError if a method, attribute or setting is missing, or a method takes other parameters."""
    for name, parameters in METHODS.items():
        method = getattr(GRPOTrainer, name, None)
        names_of_method = set() if method is None else parameters_of(method)
        require({*parameters} <= names_of_method, f"GRPOTrainer.{name}({', '.join(parameters)}) is gone")
    for name in (*TRAINER_ATTRIBUTES, *installed_members(OF_TRAINER)):
        require(hasattr(trainer, name), f"GRPOTrainer.{name} is gone")
    for name in (*SETTINGS, *installed_members(OF_ARGUMENTS)):
        require(hasattr(trainer.args, name), f"GRPOConfig.{name} is gone")
    require(hasattr(grpo_trainer, SHUFFLE), f"trl.trainer.grpo_trainer.{SHUFFLE} is gone")


def _warn_of_unknown_settings(trainer: GRPOTrainer) -> None:
    """Name the fields of GRPOConfig that are newer than this package and differ from their defaults."""
    for field in dataclasses.fields(GRPOConfig):
        if field.name in KNOWN_SETTINGS or field.name in TrainingArguments.__dataclass_fields__:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(trainer.args, field.name)
        if value != default and trainer.accelerator.is_main_process:
            logger.warning(
                f"{field.name}={value!r} of GRPOConfig in trl {trl_version} is unknown to this version of rl-training: "
                "check loss and sampling"
            )


def refuse_what_cannot_be_measured(trainer: GRPOTrainer) -> None:
    """Raise UserError, with the fix, if probes would corrupt training or could measure nothing."""
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise UserError("the model has no parameter that requires a gradient: there is no step to measure")
    refuse_devices_without_float64(trainer.accelerator.device, "use_cpu=True")
    args, state = trainer.args, trainer.accelerator.state
    if why := cannot_train(trainer.accelerator.device):
        raise UserError(why)
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise UserError(
            "reentrant gradient checkpointing gives a second backward no gradients: "
            'set gradient_checkpointing_kwargs={"use_reentrant": False}, or leave gradient_checkpointing out where TRL '
            "makes it reentrant, for adapters under ZeRO-3"
        )
    if setting(args, "ddp_static_graph"):
        raise UserError("a second backward silently corrupts DDP's static_graph: set ddp_static_graph=False")
    # fp16 may be set in TRL's arguments, in accelerate's configuration, or in DeepSpeed's.
    if args.fp16 or trainer.accelerator.mixed_precision == "fp16" or trainer.accelerator.scaler is not None:
        raise UserError(FP16)
    if trainer.is_fsdp_enabled:
        refuse_fsdp_that_cannot_be_read(state.fsdp_plugin)
    if trainer.is_deepspeed_enabled:
        refuse_deepspeed_that_cannot_be_read(state.deepspeed_plugin.deepspeed_config)
    if trainer.mask_truncated_completions and has_sharded_weights(trainer):
        raise UserError(
            "mask_truncated_completions needs one more forward pass inside training's own, where FSDP2 and ZeRO-3 have "
            "sharded the weights: use ZeRO-2 (launch/zero2.yaml), or train without probes (no attach; probe=none)"
        )


def refuse_deepspeed_that_cannot_be_read(config: Mapping[str, Any]) -> None:
    """Raise UserError, with the fix, for a DeepSpeed configuration under which probes cannot measure."""
    if config.get("fp16", {}).get("enabled") is True:
        raise UserError(FP16)
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in READABLE_STAGES:
        raise UserError(
            f"probes read the gradients and states of ZeRO stages 1, 2 and 3, and this is stage {stage}: use "
            "launch/zero2.yaml, or DDP (launch/ddp.yaml), or train without probes (no attach; probe=none)"
        )
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device", "none") != "none":
            raise UserError(
                f"probes do not read what ZeRO has offloaded: leave out {name}, or no probes (no attach; probe=none)"
            )


def refuse_fsdp_that_cannot_be_read(plugin: Any) -> None:
    """Raise UserError, with the fix, for accelerate's FSDP settings under which probes cannot measure."""
    if plugin.fsdp_version != 2:
        raise UserError(
            "probes do not read FSDP1, which flattens the parameters of a layer into one: set fsdp_version: 2 "
            "(launch/fsdp2.yaml), use DDP or ZeRO, or train without probes (no attach; probe=none)"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UserError(
            "probes do not read what FSDP has offloaded: set fsdp_offload_params: false, or train without probes "
            "(no attach; probe=none)"
        )


def refuse_split_prompts(trainer: GRPOTrainer) -> None:
    """Raise UserError if an optimizer step or a generation of one rank does not hold whole prompts."""
    args, group = trainer.args, trainer.num_generations
    size = args.per_device_train_batch_size
    counts = {"an optimizer step": args.gradient_accumulation_steps, "a generation": args.steps_per_generation}
    for what, count in counts.items():
        if size * count % group:
            raise UserError(
                f"{what} has {count} x {size} sequences on a process, no multiple of num_generations={group}: it "
                "cannot hold all responses of its prompts. Use "
                f"per_device_train_batch_size={-(-size // group) * group}"
            )


def warn_of_a_step_without_loss(trainer: GRPOTrainer) -> None:
    """Warn, once, about a step whose loss was not computed by compute_loss, the method that is wrapped."""
    if trainer.accelerator.is_main_process:
        logger.warning_once(
            f"{type(trainer).__name__}.training_step does not call compute_loss, where probes see the loss: its steps "
            "have no estimates. Call super().training_step, or compute the loss in compute_loss"
        )


def warn_of_leftover_responses(trainer: GRPOTrainer) -> None:
    """Warn that TRL starts with responses left over from the trainer's previous training."""
    if not trainer.accelerator.is_main_process:
        return
    if trainer._step % trainer.args.gradient_accumulation_steps:
        logger.warning(
            "this trainer's last training ended within a step, and TRL goes on in the middle of its responses: each "
            "step learns from stale ones. Make a new trainer"
        )
    else:
        logger.warning(
            "this trainer's last training ended before it had used up its responses, and TRL goes on with what is left "
            "of them. Make a new trainer, or train for a number of steps that uses them up"
        )
