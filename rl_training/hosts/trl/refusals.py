"""Errors for settings of a trainer under which probes would corrupt training or could measure nothing, with the fix.

A setting that only one estimate cannot handle is no error: that estimate is nan (step/reasons.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy
from trl import GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.devices import refuse_devices_without_float64
from rl_training.hosts.trl.settings.spelling import WITHOUT_PROBES
from rl_training.hosts.trl.sharding import has_sharded_weights
from rl_training.hosts.trl.versions import cannot_train_reason, setting

READABLE_STAGES = (1, 2, 3)  # stages of ZeRO
FP16 = (
    "fp16 scales the loss, and with it the gradients that probes read (fp16=True, accelerate's mixed_precision: fp16, "
    f"or DeepSpeed's fp16): use bf16 or fp32, or {WITHOUT_PROBES}"
)


def refuse_a_running_training(trainer: GRPOTrainer) -> None:
    """Raise UserError if the trainer's `train()` is running: a callback attaches too late to measure a step.

    Only the call stack shows it: a trainer takes a training that has failed for a running one. A `train()` of its own
    may still attach before it calls that of TRL.
    """
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name == "_inner_training_loop" and frame.f_locals.get("self") is trainer:
            raise UserError("this trainer is training: attach(trainer, ...) before trainer.train(), not within it")


def refuse_what_cannot_be_measured(trainer: GRPOTrainer) -> None:
    """Raise UserError, with the fix, if probes would corrupt training or could measure nothing."""
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise UserError("the model has no parameter that requires a gradient: there is no step to measure")
    refuse_devices_without_float64(trainer.accelerator.device, "use_cpu=True")
    args = trainer.args
    state = trainer.accelerator.state
    reason = cannot_train_reason(trainer.accelerator.device)
    if reason is not None:
        raise UserError(reason)
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
            f"sharded the weights: use ZeRO-2 (launch/zero2.yaml), or {WITHOUT_PROBES}"
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
            f"launch/zero2.yaml, or DDP (launch/ddp.yaml), or {WITHOUT_PROBES}"
        )
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device", "none") != "none":
            raise UserError(f"probes do not read what ZeRO has offloaded: leave out {name}, or {WITHOUT_PROBES}")


def refuse_fsdp_that_cannot_be_read(plugin: Any) -> None:
    """Raise UserError, with the fix, for accelerate's FSDP settings under which probes cannot measure."""
    if plugin.fsdp_version != 2:
        raise UserError(
            "probes do not read FSDP1, which flattens the parameters of a layer into one: set fsdp_version: 2 "
            f"(launch/fsdp2.yaml), use DDP or ZeRO, or {WITHOUT_PROBES}"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UserError(
            f"probes do not read what FSDP has offloaded: set fsdp_offload_params: false, or {WITHOUT_PROBES}"
        )
