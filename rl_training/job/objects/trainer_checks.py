"""Checks of a configuration that need TRL, the launcher's environment or the built trainer."""

from __future__ import annotations

import dataclasses
import os
import re

from accelerate.utils import parse_flag_from_env
from omegaconf import DictConfig
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.hosts.trl.config import DrGRPOConfig
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.job.configuration.values import check_kind
from rl_training.options import did_you_mean

logger = logging.get_logger(__name__)


def check_fields(trainer: DictConfig) -> None:
    """Raise UserError for a setting that DrGRPOConfig does not have, or whose value is not the number it needs."""
    fields = {field.name: field for field in dataclasses.fields(DrGRPOConfig) if field.init}
    for name, value in zip(map(str, trainer), trainer.values(), strict=True):
        if name in fields:
            annotation = fields[name].type
            names = set(re.findall(r"\w+", getattr(annotation, "__name__", str(annotation))))
            kinds = [kind for kind in (float, int, bool) if kind.__name__ in names]
            # Text, lists and fields of other types are checked by the code that reads them.
            if names <= {"float", "int", "bool", "None"} and (value is not None or "None" not in names):
                check_kind(f"trainer.{name}", value, kinds[0](), ", or null" * ("None" in names))
        elif name != "_target_":
            hint = did_you_mean(name, {field: f"trainer.{field}" for field in fields})
            raise UserError(f"trainer.{name} is not a field of DrGRPOConfig, see trl.GRPOConfig{hint}")


def check_number_of_processes(num_processes: int) -> None:
    """Raise UserError if the launcher was asked for several processes but started one, which would train alone.

    accelerate launch silently starts a single process if it does not see several GPUs (--cpu, MULTI_CPU, or no
    configuration at all). It does not pass on the requested number, but the rendezvous address that it sets reveals
    that several were requested.
    """
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if expected != num_processes:
        raise UserError(
            f"WORLD_SIZE={expected}, but the number of processes is {num_processes}: start them with accelerate launch "
            "or torchrun, or unset WORLD_SIZE"
        )
    has_rendezvous_only = "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ
    if has_rendezvous_only and "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise UserError(
            "accelerate launch was asked for several processes and started only this one: use --config_file "
            "launch/cpu_ddp.yaml for several processes on the CPU, launch/ddp.yaml for several GPUs. If one process is "
            "meant: --num_processes 1, and unset MASTER_PORT"
        )


def check_sharding(trainer: DrGRPOTrainer) -> None:
    """Raise UserError if accelerate silently uses DDP instead of DeepSpeed or FSDP, or if FSDP shards checkpoints."""
    for name, is_enabled in (("DEEPSPEED", trainer.is_deepspeed_enabled), ("FSDP", trainer.is_fsdp_enabled)):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}") and not is_enabled:
            raise UserError(
                f"{name} was asked for, and accelerate gives DDP instead: FSDP never runs on the CPU, and DeepSpeed "
                "only where ACCELERATE_USE_CPU is not set (set DS_ACCELERATOR=cpu instead, see launch/zero2.yaml)"
            )
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.state_dict_type.name != "FULL_STATE_DICT":
        raise UserError(
            "fsdp_state_dict_type: SHARDED_STATE_DICT writes checkpoints without model.safetensors, which cannot be "
            "read here: use FULL_STATE_DICT (launch/fsdp2.yaml)"
        )


def check_longest_prompt(trainer: DrGRPOTrainer) -> None:
    """Raise UserError if a prompt with its response can exceed the model's positions; training would go on silently."""
    positions = getattr(trainer.model.config, "max_position_embeddings", None)
    prompts = [row for row in trainer.train_dataset["prompt"] if isinstance(row, str)]  # chats would need the template
    if positions is None or not prompts:
        return
    length = len(trainer.processing_class(max(prompts, key=len)).input_ids) + trainer.args.max_completion_length
    if length > positions:
        raise UserError(
            f"the longest prompt and trainer.max_completion_length={trainer.args.max_completion_length} need {length} "
            f"tokens, and the model has {positions} positions: leave out long prompts, or lower the length of responses"
        )


def warn_of_rounding(trainer: DrGRPOTrainer) -> None:
    """Warn if trained weights are stored in 16 bits, except under DeepSpeed, which keeps an fp32 copy."""
    rounded = {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad and p.dtype.itemsize < 4}
    if rounded and not trainer.is_deepspeed_enabled:
        logger.warning(
            f"all weights are trained and kept in {', '.join(rounded).replace('torch.', '')}, which loses small "
            "changes of a weight (below 0.2 % in bfloat16); reinforcement learning makes smaller ones: use "
            "model.dtype=float32 (trainer.bf16 still computes in bf16), or adapter=lora, whose adapter is fp32"
        )


def refuse_chats_without_template(trainer: DrGRPOTrainer) -> None:
    """Raise UserError if prompts are messages and the model has no chat template to make a text of them."""
    template = getattr(trainer.processing_class, "chat_template", None)
    if template is None and not isinstance(trainer.train_dataset[0]["prompt"], str):
        raise UserError(
            "the prompts of this task are messages, and the model has no chat template: choose a chat model, or a task "
            "whose prompts are text"
        )


def warn_of_plain_prompts(trainer: DrGRPOTrainer) -> None:
    """Warn if prompts are plain text although the model has a chat template, which TRL then silently skips."""
    template = getattr(trainer.processing_class, "chat_template", None)
    if template and isinstance(trainer.train_dataset[0]["prompt"], str):
        logger.warning(
            "prompts are plain text, so the model's chat template is not applied. That is right for a base model; a "
            "chat model wants messages: prompt=[{'role': 'user', 'content': …}]"
        )
