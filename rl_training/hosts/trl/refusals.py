"""Settings under which probes would corrupt training, or nothing could be measured: refused, with what to do instead.

Settings under which part of what is measured is not shown: one warning, with what to do.

A setting that only one estimate cannot handle is not refused: that estimate is nan, see engine/capabilities.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.engine.capabilities import Fixes

logger = logging.get_logger(__name__)

READABLE_STAGES = (1, 2, 3)  # of ZeRO
FIXES = Fixes(
    whole_prompts="use DrGRPOTrainer, or attach(..., whole_prompts=True), with a multiple of num_generations sequences "
    "in a microbatch",
    dr_grpo="set loss_type='dr_grpo', scale_rewards='none', beta=0 and mask_truncated_completions=False, or use "
    "DrGRPOTrainer",
)


def refuse_what_cannot_be_measured(trainer: GRPOTrainer) -> None:
    """Raises ValueError, saying what to do, where probes would corrupt training or could measure nothing."""
    _refuse_backwards_that_are_corrupted(trainer)
    _refuse_sharded_states(trainer)


def _refuse_backwards_that_are_corrupted(trainer: GRPOTrainer) -> None:
    args = trainer.args
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        if trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
            raise ValueError(
                "TRL makes gradient checkpointing of adapters reentrant under ZeRO-3, which gives a second backward no "
                "gradients: leave gradient_checkpointing out, or use ZeRO-2 (launch/zero2.yaml)"
            )
        raise ValueError(
            "reentrant gradient checkpointing gives a second backward no gradients: "
            'set gradient_checkpointing_kwargs={"use_reentrant": False}'
        )
    ddp = trainer.accelerator.ddp_handler
    if args.ddp_static_graph or (ddp is not None and ddp.static_graph):
        raise ValueError("a second backward silently corrupts DDP's static_graph: set ddp_static_graph=False")
    if args.fp16:
        raise ValueError("fp16 scales the loss, and with it the gradients that probes read: use bf16 or fp32")


def _refuse_sharded_states(trainer: GRPOTrainer) -> None:
    cuts_weights = ""
    if trainer.is_fsdp_enabled:
        refuse_fsdp_that_cannot_be_read(trainer.accelerator.state.fsdp_plugin)
        cuts_weights = "FSDP2"
    if trainer.is_deepspeed_enabled:
        plugin = trainer.accelerator.state.deepspeed_plugin
        refuse_deepspeed_that_cannot_be_read(plugin.deepspeed_config)
        cuts_weights = "ZeRO-3" if plugin.zero_stage == 3 else ""
    if cuts_weights and trainer.mask_truncated_completions:
        raise ValueError(
            f"mask_truncated_completions needs one more forward pass inside training's own, where {cuts_weights} has "
            "sharded the weights: use ZeRO-2 (launch/zero2.yaml), or train without probes (probe=none)"
        )


def refuse_deepspeed_that_cannot_be_read(config: Mapping[str, Any]) -> None:
    """Raises ValueError, saying what to do, for a DeepSpeed configuration under which probes cannot measure."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in READABLE_STAGES:
        raise ValueError(
            f"probes read the gradients and states of ZeRO stages 1, 2 and 3, and this is stage {stage}: use "
            "launch/zero2.yaml, or DDP (launch/ddp.yaml), or train without probes (probe=none)"
        )
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device", "none") != "none":
            raise ValueError(
                f"probes do not read what ZeRO has offloaded: leave out {name}, or train without probes (probe=none)"
            )


def refuse_fsdp_that_cannot_be_read(plugin: Any) -> None:
    """Raises ValueError, saying what to do, for accelerate's settings of FSDP under which probes cannot measure."""
    if plugin.fsdp_version != 2:
        raise ValueError(
            "probes do not read FSDP1, which flattens the parameters of a layer into one: set fsdp_version: 2 "
            "(launch/fsdp2.yaml), use DDP or ZeRO, or train without probes (probe=none)"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError(
            "probes do not read what FSDP has offloaded: set fsdp_offload_params: false, or train without probes "
            "(probe=none)"
        )


def refuse_split_prompts(trainer: GRPOTrainer) -> None:
    """Raises ValueError when microbatches cannot hold whole prompts."""
    size, group = trainer.args.per_device_train_batch_size, trainer.num_generations
    if size % group:
        raise ValueError(
            f"per_device_train_batch_size={size} is not a multiple of num_generations={group}, so a microbatch cannot "
            f"hold all responses of its prompts: use {-(-size // group) * group}"
        )


def warn_of_rare_logs(trainer: GRPOTrainer) -> None:
    """Warns where the trainer does not log every step: its log then keeps no estimate of the steps between."""
    args = trainer.args
    by_steps = args.logging_strategy == "steps"
    if trainer.accelerator.is_main_process and not (by_steps and args.logging_steps == 1):
        given = f"logging_steps={args.logging_steps}" if by_steps else f"logging_strategy={args.logging_strategy.value}"
        logger.warning(
            f"{given}: the trainer's log, metrics.jsonl and dashboards have the probes' numbers of the logged steps "
            "only, and means of reward and loss: set logging_steps=1 (probes.jsonl has every step)"
        )
