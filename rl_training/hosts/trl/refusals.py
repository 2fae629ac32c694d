"""Settings under which probes would corrupt training, or nothing could be measured: refused, with what to do instead.

A setting that only one estimate cannot handle is not refused: that estimate is nan, see engine/capabilities.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.engine.capabilities import Fixes
from rl_training.hosts.trl.sharding import has_sharded_weights

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
    args, state, ddp = trainer.args, trainer.accelerator.state, trainer.accelerator.ddp_handler
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "reentrant gradient checkpointing gives a second backward no gradients: "
            'set gradient_checkpointing_kwargs={"use_reentrant": False}, or leave gradient_checkpointing out where TRL '
            "makes it reentrant, for adapters under ZeRO-3"
        )
    if args.ddp_static_graph or (ddp is not None and ddp.static_graph):
        raise ValueError("a second backward silently corrupts DDP's static_graph: set ddp_static_graph=False")
    if args.fp16:
        raise ValueError("fp16 scales the loss, and with it the gradients that probes read: use bf16 or fp32")
    if trainer.is_fsdp_enabled:
        refuse_fsdp_that_cannot_be_read(state.fsdp_plugin)
    if trainer.is_deepspeed_enabled:
        refuse_deepspeed_that_cannot_be_read(state.deepspeed_plugin.deepspeed_config)
    if trainer.mask_truncated_completions and has_sharded_weights(trainer):
        raise ValueError(
            "mask_truncated_completions needs one more forward pass inside training's own, where FSDP2 and ZeRO-3 have "
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
