"""Probes for reinforcement learning of language models: they run inside the training loop of TRL's GRPO trainer."""

from rl_training.live.attach import attach
from rl_training.live.trainer import DrGRPOConfig, DrGRPOTrainer
from rl_training.mathematics.estimate import Estimate
from rl_training.probes.base import Probe

__all__ = ["DrGRPOConfig", "DrGRPOTrainer", "Estimate", "Probe", "attach"]
