"""A trainer as probes see it: how it scores, what it learns from, and its loss."""

from __future__ import annotations

from dataclasses import dataclass

from trl import GRPOTrainer

from rl_training.hosts.trl.options import Options
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.rollouts.current import Rollouts
from rl_training.hosts.trl.trained_loss import TrainedLoss


@dataclass(frozen=True)
class MeasuredTrainer:
    """A trainer that is attached to, and what is read from it. `of` makes it."""

    trainer: GRPOTrainer
    policy: TrainerPolicy  # scores as the trainer does
    rollouts: Rollouts  # what is known about its batches
    loss: TrainedLoss  # its loss, with its interventions
    options: Options  # of the attachment

    @classmethod
    def of(cls, trainer: GRPOTrainer, options: Options) -> MeasuredTrainer:
        """Return a trainer as probes see it. UserError if it cannot train with the interventions of the options."""
        policy = TrainerPolicy(trainer)
        loss = TrainedLoss(trainer, policy, options.interventions, options.spelling)
        return cls(trainer, policy, Rollouts(trainer, policy), loss, options)
