"""Reads the settings of TRL's loss, as the engine knows them."""

from __future__ import annotations

import math
from typing import Any

from trl import GRPOTrainer

from rl_training.hosts.trl.versions import of_trainer, setting
from rl_training.step.batch import Correction, LossSettings

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
