"""DrGRPOConfig: TRL's GRPOConfig with Dr-GRPO's settings as defaults.

Dr-GRPO (Liu et al. 2025, "Understanding R1-Zero-like training") removes two biases of GRPO: advantages are not divided
by the group's standard deviation, and a sequence's loss is summed over its tokens and divided by a constant, the
maximum completion length. Every other TRL loss can be set too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from accelerate.utils import parse_flag_from_env
from trl import GRPOConfig

from rl_training.records.files.masking import without_secrets
from rl_training.records.files.secret_forms import MASK


@dataclass
class DrGRPOConfig(GRPOConfig):
    """`trl.GRPOConfig` with Dr-GRPO's loss, and with defaults under which probes can measure.

    It has every field of `trl.GRPOConfig`. The fields below are new, or have other defaults. Without an accelerator it
    trains in fp32 on the CPU, with no setting needed.

    Args:
        loss_type: "dr_grpo": a sum over tokens, divided by a constant.
        scale_rewards: "none": advantages are not divided by the group's standard deviation.
        beta: 0: no KL penalty.
        target_kl_share: The KL divergence of each step as a share of the policy's entropy, both per token: "auto",
            which is 1e-2, or a number. The learning rate of each step is set to meet it. None uses `learning_rate`.
        logging_steps: 1: the trainer logs every step, so that every optimizer step has a full line in the records.
        bf16: None means False on the CPU, and TRL's default elsewhere.
        gradient_checkpointing: None means False, where TRL's default is True.
        ddp_find_unused_parameters: False, which saves DDP a search of the graph at every backward.
    """

    loss_type: str = "dr_grpo"
    scale_rewards: str = "none"
    beta: float = 0.0
    target_kl_share: float | str | None = None
    logging_steps: float = 1
    bf16: bool | None = None
    gradient_checkpointing: bool | None = None  # transformers reads None as False
    ddp_find_unused_parameters: bool | None = False

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU"):
            self.use_cpu = True
        if self.use_cpu and self.bf16 is None:
            self.bf16 = False
        super().__post_init__()

    def __copy__(self) -> Self:
        return self._with_fields(vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with_fields(copy.deepcopy(vars(self), memo))

    def _with_fields(self, fields: Mapping[str, Any]) -> Self:
        """Return a copy with these fields, access tokens included: only a pickle lacks them."""
        made = object.__new__(type(self))
        made.__dict__.update(fields)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without access tokens: every checkpoint holds a pickle, training_args.bin."""
        masked = without_secrets(vars(self))
        return {name: None if value == MASK else value for name, value in masked.items()}
