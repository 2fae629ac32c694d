"""Tells of a loss that the hook around compute_loss does not see, because a subclass computes it elsewhere.

What is measured then lacks it, which is a warning. What changes training would not act on it, which is an error: no
training goes on without its interventions or without the learning rate that `target_kl_share` sets.
"""

from __future__ import annotations

from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.trl.options import Options

logger = logging.get_logger(__name__)

FIX = "Call super().training_step, or compute the loss in compute_loss"


def warn_of_a_step_without_loss(trainer: GRPOTrainer) -> None:
    """Warn, once, about a step of which no loss was seen: it has no estimates."""
    if trainer.accelerator.is_main_process:
        logger.warning_once(
            f"{type(trainer).__name__}.training_step does not call compute_loss, where probes see the loss: its steps "
            f"have no estimates. {FIX}"
        )


def refuse_an_unchanged_loss(trainer: GRPOTrainer, options: Options) -> None:
    """Raise UserError for a loss on which what changes training cannot act."""
    names = [intervention.name for intervention in options.changes_of_loss]
    change = options.spelling.interventions(names) if names else options.spelling.name("target_kl_share")
    raise UserError(
        f"step {trainer.state.global_step + 1}: {type(trainer).__name__} trains on a loss that self.compute_loss, with "
        f"the model in training mode, did not return to training_step, so {change} does not act on it. {FIX}; or train "
        f"without {change}"
    )
