"""verl's synchronous trainer, which keeps the responses to a prompt together and tells the engine what to measure."""

from __future__ import annotations

import functools
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rl_training.hosts.verl.members import TRAINER_METHODS, refuse_other_methods
from rl_training.hosts.verl.message import BATCH_KEY, Message, rollout_facts
from rl_training.hosts.verl.refusals import refuse_what_cannot_be_measured
from rl_training.hosts.verl.training_settings import TrainingSettings, training_settings
from rl_training.hosts.verl.whole_prompts import whole_prompts_fix, whole_prompts_order

TRAINER = "sync_with_probes"  # its name in trainer.v1.trainer_mode
LIBRARY = "rl_training.hosts.verl"  # registers the engine in each worker that imports it

refuse_other_methods(PPOTrainerSync, TRAINER_METHODS)


def with_probes(config: DictConfig) -> DictConfig:
    """Put this trainer and this engine into verl's configuration, in place, and return it. Twice is as good as once.

    Raises:
        UserError: Its settings or probes cannot be measured.
    """
    refuse_what_cannot_be_measured(config)
    model = config.actor_rollout_ref.model
    with open_dict(config):
        libraries = model.external_lib if model.external_lib is not None else []
        libraries = [libraries] if isinstance(libraries, str) else libraries
        model.external_lib = [*(library for library in libraries if library != LIBRARY), LIBRARY]
        config.trainer.v1.trainer_mode = TRAINER
    return config


@register_trainer(TRAINER)
class ProbedTrainer(PPOTrainerSync):
    """verl's synchronous trainer, with whole prompts on each rank and with a message to the engine in its batches."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(with_probes(config))  # verl's own command has not called it

    @functools.cached_property
    def _training_settings(self) -> TrainingSettings:
        return training_settings(self.config, self.tokenizer.eos_token_id)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Order the rows so that each rank gets whole prompts. verl deals out consecutive rows, equally many each."""
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        lengths = [tag["seq_len"] for tag in batch.tags]
        rows = whole_prompts_order(batch.keys, lengths, self.actor_rollout_wg.world_size)
        if rows is not None:
            batch.reorder(rows)
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Train on a rollout, which the workers receive with a message."""
        config, rollout = self.config, rollout_facts(batch.tags, self.global_steps)
        batch.extra_info[BATCH_KEY] = Message(training=self._training_settings, rollout=rollout)
        if config.actor_rollout_ref.actor.use_dynamic_bsz and not whole_prompts_fix(config):
            # verl splits batches by tokens alone, which would split prompts. A group too large for a microbatch would
            # end training, so this is set only if every group fits.
            batch.extra_info["force_group_size"] = config.actor_rollout_ref.rollout.n
        return super()._update_actor(batch, metrics)


@ray.remote
class Runner(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner, in a process where this trainer is registered."""

    def run(self, config: DictConfig) -> None:
        from rl_training.hosts.verl import trainer  # noqa: F401, registers it: Ray sends the class, not its module

        super().run(config)
