"""The options of an attachment, for `attach` and for DrGRPOTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import TrainerCallback

from rl_training.interventions.named import Intervention


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `attach`, which documents them, and of DrGRPOTrainer."""

    whole_prompts: bool | None = None
    metrics: Literal["core", "all"] = "core"
    target_kl_share: float | str | None = None
    interventions: Sequence[Intervention] = ()  # that the trainer trains with, applied in this order
    keep_attached: bool = False  # whether the probes stay attached after a training has ended
    strict: bool | None = None
    callback: TrainerCallback | None = None  # added to the trainer and removed with the probes
    # Whether a command trains: advice names settings as trainer.NAME=VALUE, and the command has locked its folder.
    is_cli: bool = False
