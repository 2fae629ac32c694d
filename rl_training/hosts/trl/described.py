"""How a trainer of TRL's is set up, for the records of a run that has no config.yaml."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trl import GRPOTrainer

from rl_training.hosts.described import settings_of_model, settings_of_optimizer
from rl_training.parallel.ranks import all_ranks

# How arguments begin that do not affect training: what the trainer says, and where; beside those of records/folder.py.
NOT_OF_TRAINING = (
    *("hub_", "push_to_hub", "log_", "do_", "include_", "trackio_", "wandb_", "resume_from_checkpoint", "local_rank"),
    *("restore_callback_states_from_checkpoint", "skip_memory_metrics", "num_completions_to_print", "load_best_model"),
    *("report_to", "deepspeed_plugin", "distributed_state", "torch_empty_cache_steps", "vllm_server_", "vllm_gpu_"),
)


def settings_of_trainer(trainer: GRPOTrainer, attached: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a trainer that affect its training, by name, and those of what was attached to it."""
    args, processes = trainer.args, all_ranks().count
    names = (field.name for field in dataclasses.fields(args))
    fields = {name: getattr(args, name) for name in names if not name.startswith(NOT_OF_TRAINING)}
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's around it
    return {
        "sequences_per_step": step,
        "processes": processes,
        "trainer": {"class": type(trainer).__name__, **fields},
        "rewards": list(trainer.reward_func_names),
        "training_set": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
        **settings_of_model(trainer.model),
        **settings_of_optimizer(optimizer),
        **attached,
    }
