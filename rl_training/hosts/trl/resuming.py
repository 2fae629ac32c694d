"""What lets DrGRPOTrainer resume: checkpoints between rollouts, and settings of its own for a branch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy, SchedulerType
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.trl.settings.spelling import Spelling

logger = logging.get_logger(__name__)


class SaveBetweenRollouts(TrainerCallback):
    """Moves checkpoints to steps that use up a rollout, and logs this: TRL does not save a rollout still in use.

    Args:
        steps_per_rollout: Optimizer steps per rollout. With 1, the usual value, nothing is moved.
    """

    def __init__(self, steps_per_rollout: int) -> None:
        self.steps_per_rollout = steps_per_rollout

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        every = self.steps_per_rollout
        notes = []
        if state.global_step % every:
            notes.append(f"step {state.global_step}, where this run resumes, is inside one")
        if args.save_strategy == SaveStrategy.STEPS:
            requested = state.save_steps
            state.save_steps = math.ceil(requested / every) * every
            if state.save_steps != requested:
                notes.append(f"checkpoints are written every {state.save_steps} steps, not every {requested}")
            if state.max_steps % every:
                notes.append(f"the last checkpoint, of step {state.max_steps}, is inside one")
        if notes and state.is_world_process_zero:
            logger.warning(
                f"a rollout lasts {every} optimizer steps, and TRL does not save it: training resumes exactly only "
                f"where one ends. {'; '.join(notes)}"
            )


@contextlib.contextmanager
def keep_settings(trainer: GRPOTrainer, spelling: Spelling) -> Iterator[None]:
    """Keep this trainer's settings while a checkpoint is loaded: only moments and the schedule's position change.

    Learning rates, betas, weight decay and save steps stay this trainer's.

    Args:
        trainer: The trainer.
        spelling: Names settings in advice.

    Raises:
        UserError: If they cannot be kept.
    """
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    if trainer.is_deepspeed_enabled or not isinstance(schedule, LambdaLR):
        kind = SchedulerType(trainer.args.lr_scheduler_type)
        raise UserError(
            f"a branch and {spelling.interventions(['lr'])} set new learning rates, but DeepSpeed and "
            f"{spelling.setting('lr_scheduler_type', kind.value)} take them from the checkpoint: "
            f"{spelling.continue_itself}"
        )
    base = schedule.base_lrs
    groups = [dict(group) for group in trainer.optimizer.param_groups]
    yield
    rates = [rate * factor(schedule.last_epoch) for rate, factor in zip(base, schedule.lr_lambdas, strict=True)]
    schedule.load_state_dict(schedule.state_dict() | {"base_lrs": base, "_last_lr": rates})
    for group, settings, rate in zip(trainer.optimizer.param_groups, groups, rates, strict=True):
        group.update(settings, params=group["params"], lr=rate)
    trainer.state.compute_steps(trainer.args, trainer.state.max_steps)
