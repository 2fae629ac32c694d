"""Makes the trainer that a configuration describes, for a training or restored at a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from transformers import PrinterCallback, ProgressCallback, set_seed
from transformers.utils import logging

from rl_training.engine.probe import Probe
from rl_training.hosts.trl.config import DrGRPOConfig
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.job.configuration.checks import check_settings
from rl_training.job.configuration.groups import TRAINER_KEYS
from rl_training.job.configuration.stored import refuse_marked
from rl_training.job.errors import as_user_errors
from rl_training.job.objects.make import make, make_task
from rl_training.job.objects.trainer_checks import (
    check_fields,
    check_longest_prompt,
    check_number_of_processes,
    check_sharding,
    refuse_chats_without_template,
    warn_of_plain_prompts,
    warn_of_rounding,
)
from rl_training.models.adapter_patterns import refuse_endless_patterns
from rl_training.offline.phases import explain_out_of_memory
from rl_training.offline.restored import RestoredTrainer, restore
from rl_training.records.folder import TRAINING_STATE
from rl_training.records.writer import Records

logger = logging.get_logger(__name__)


def build_restored(cfg: DictConfig, checkpoint: Path, learning_rate: float | None = None) -> RestoredTrainer:
    """Return a trainer with this run's configuration, restored at one of its checkpoints. It writes nothing.

    Raises:
        UserError: If the checkpoint does not match the configuration; the message names the fix. See restored.py.
    """
    with as_user_errors(), explain_out_of_memory("load"), tempfile.TemporaryDirectory() as scratch:
        cfg = cfg.copy()
        cfg.run_dir = scratch
        output = f"{scratch}/{TRAINING_STATE}"
        silent = {
            "report_to": [], "eval_strategy": "no", "save_strategy": "no", "output_dir": output, "push_to_hub": False,
            "log_completions_hub_repo": None,
        }  # fmt: skip
        OmegaConf.update(cfg, "trainer", silent, merge=True, force_add=True)
        refuse_marked(cfg, *TRAINER_KEYS)
        check_settings(cfg)
        check_fields(cfg.trainer)
        # One microbatch suffices: how a step is split does not change its gradient.
        args = make("trainer", cfg.trainer, gradient_accumulation_steps=1)
        check_number_of_processes(args.world_size)
        trainer = make_trainer(cfg, args, [], None, with_evaluation=True)
        return restore(trainer, checkpoint, learning_rate)


def make_trainer(
    cfg: DictConfig, args: DrGRPOConfig, probes: list[Probe], records: Records | None, with_evaluation: bool
) -> DrGRPOTrainer:
    """Return the trainer. `with_evaluation` also gives it the evaluation split of its task."""
    interventions = cfg.intervention or []
    set_seed(cfg.seed)  # before the model is made: an adapter's weights are random
    task = make_task(cfg.data)
    model, tokenizer = make("model", cfg.model)
    adapter = make("adapter", cfg.adapter)
    buffer = make("buffer", cfg.buffer)
    refuse_endless_patterns(adapter, "adapter", (name for name, _ in model.named_modules()))
    trainer = DrGRPOTrainer(
        model=model,
        reward_funcs=task.reward,
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.held_out if with_evaluation else None,
        processing_class=tokenizer,
        peft_config=adapter or None,
        probes=probes,
        records=records,
        interventions=[interventions] if isinstance(interventions, str) else interventions,
        buffer=buffer or None,
        is_cli=True,
    )
    check_sharding(trainer)
    warn_of_rounding(trainer)
    check_longest_prompt(trainer)
    refuse_chats_without_template(trainer)
    warn_of_plain_prompts(trainer)
    for callback in (ProgressCallback, PrinterCallback):  # these print every log line in full
        trainer.remove_callback(callback)
    return trainer
