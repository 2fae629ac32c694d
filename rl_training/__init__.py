"""Probes for reinforcement learning of language models: they run inside the training loop of TRL's GRPO trainer."""

from rl_training.attach import attach
from rl_training.estimate import Estimate
from rl_training.probes.base import Probe
from rl_training.trainer import DrGRPOConfig, DrGRPOTrainer

__all__ = ["DrGRPOConfig", "DrGRPOTrainer", "Estimate", "Probe", "attach"]
