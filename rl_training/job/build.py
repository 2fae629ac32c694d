"""From the composed configuration to the objects of a run. The only file that reads `cfg` and calls instantiate."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from omegaconf import DictConfig, OmegaConf
from transformers import PrinterCallback, ProgressCallback, set_seed
from transformers.utils import logging

from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.hosts.trl.trainer import DrGRPOConfig, DrGRPOTrainer
from rl_training.job.command_line import libraries_refuse
from rl_training.job.explain import check_kind, did_you_mean
from rl_training.job.loggers import put_loggers
from rl_training.job.run import StepProgress, StopAtStepEnd, TrainingRun
from rl_training.job.run_folder import check_number_of_processes, find_run_folder, save_config
from rl_training.job.run_settings import MADE, lost_place
from rl_training.job.settings import check_run, check_settings
from rl_training.job.stored_settings import make, refuse_marked
from rl_training.offline.phases import short_memory_says_what_to_lower
from rl_training.offline.restored import RestoredTrainer, restore
from rl_training.records.checkpoints import steps_taken
from rl_training.records.folder import LOGS_FOLDER, TRAINING_STATE
from rl_training.records.jsonl import Records
from rl_training.records.masking import without_secrets
from rl_training.records.provenance import provenance
from rl_training.records.workspace import CORE
from rl_training.tasks.task import as_task

logger = logging.get_logger(__name__)

EVAL_BATCH = 4  # microbatches at once in evaluation, which keeps nothing for a backward


def build_run(cfg: DictConfig) -> TrainingRun:
    """Returns the run that the configuration describes, of a branch as `branched` returns it.

    Raises ValueError for whatever the user got wrong.
    """
    logging.disable_progress_bar()  # transformers' over files, in the middle of the one over steps
    with libraries_refuse():
        return _build(cfg)


def _build(cfg: DictConfig) -> TrainingRun:
    _check_fields(cfg.trainer)
    accumulation = check_run(cfg)
    run_dir, checkpoint, is_its_own = find_run_folder(cfg)
    cfg.run_dir = str(run_dir)
    records = Records(run_dir / LOGS_FOLDER, cfg.rollouts.every) if PartialState().is_main_process else None
    evaluated_at_once = cfg.trainer.get("per_device_eval_batch_size", EVAL_BATCH * cfg.batch.microbatch_size)
    args = make(
        "trainer", cfg.trainer, gradient_accumulation_steps=accumulation, per_device_eval_batch_size=evaluated_at_once
    )
    probes = [make(f"probes.{name}", probe) for name, probe in cfg.probes.items()]
    trainer = _make_trainer(cfg, args, probes, records, with_evaluation=args.eval_strategy != "no")
    trainer.branches_off = checkpoint is not None and not checkpoint.resolve().is_relative_to(run_dir.resolve())
    if trainer.branches_off and (changed := lost_place(cfg)):
        trainer.has_own_random_numbers = "seed=" in changed
        logger.warning(f"{changed}: this branch takes its prompts in another order than its run")
    trainer.attachment.is_typed = True
    if not args.disable_tqdm:
        trainer.add_callback(StepProgress)
    stop = StopAtStepEnd()
    trainer.add_callback(stop)
    config = without_secrets(OmegaConf.to_container(cfg, resolve=True))
    config["provenance"] = provenance()
    config["provenance"]["loss"] = trainer.loss_in_words
    if cfg.get("branch") is not None:
        config["provenance"]["branch"] = (
            f"of {Path(cfg.branch).parents[1].name} at step {steps_taken(Path(cfg.branch))}"
        )
    save_config(config, run_dir, is_its_own)
    loggers = put_loggers(trainer, run_dir, config, CORE if cfg.logger.metrics == "core" else None)
    return TrainingRun(trainer, run_dir, checkpoint, loggers, stop)


def build_restored(cfg: DictConfig, checkpoint: Path, learning_rate: float | None = None) -> RestoredTrainer:
    """Returns a trainer of this run's configuration, restored at one of its checkpoints; it writes nothing.

    ValueError, saying what to do, where the checkpoint is not of this configuration: see restored.py.
    """
    with libraries_refuse(), short_memory_says_what_to_lower("load"), tempfile.TemporaryDirectory() as scratch:
        # One microbatch: how training would split U does not change its mean gradient.
        cfg = cfg.copy()
        cfg.run_dir, output = scratch, f"{scratch}/{TRAINING_STATE}"
        silent = {
            "report_to": [], "eval_strategy": "no", "save_strategy": "no", "output_dir": output, "push_to_hub": False,
            "log_completions_hub_repo": None,
        }  # fmt: skip
        OmegaConf.update(cfg, "trainer", silent, merge=True, force_add=True)
        refuse_marked(cfg, *MADE)
        check_settings(cfg)
        _check_fields(cfg.trainer)
        args = make("trainer", cfg.trainer, gradient_accumulation_steps=1)
        check_number_of_processes(args.world_size)
        trainer = _make_trainer(cfg, args, [], None, with_evaluation=True)
        return restore(trainer, checkpoint, learning_rate)


def _make_trainer(
    cfg: DictConfig, args: DrGRPOConfig, probes: list[Probe], records: Records | None, with_evaluation: bool
) -> DrGRPOTrainer:
    """Returns the trainer, with the evaluation split of its task if asked for."""
    interventions = cfg.intervention or []
    set_seed(cfg.seed)  # before the model: an adapter's weights are drawn
    task = as_task(make("data", cfg.data))
    model, tokenizer = make("model", cfg.model)
    adapter, buffer = make("adapter", cfg.adapter), make("buffer", cfg.buffer)
    trainer = DrGRPOTrainer(
        model=model,
        reward_funcs=task.reward,
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset if with_evaluation else None,
        processing_class=tokenizer,
        peft_config=adapter or None,
        probes=probes,
        records=records,
        interventions=[interventions] if isinstance(interventions, str) else interventions,
        buffer=buffer or None,
    )
    _check_sharding(trainer)
    _warn_of_rounding(trainer)
    _check_longest_prompt(trainer)
    for callback in (ProgressCallback, PrinterCallback):  # they print every log line in full
        trainer.remove_callback(callback)
    return trainer


def _check_fields(trainer: DictConfig) -> None:
    """Raises ValueError for a setting that DrGRPOConfig lacks, and for one that is no number where it needs one."""
    fields = {field.name: field for field in dataclasses.fields(DrGRPOConfig) if field.init}
    for name, value in zip(map(str, trainer), trainer.values(), strict=True):
        if name in fields:
            annotation = fields[name].type
            names = set(re.findall(r"\w+", getattr(annotation, "__name__", str(annotation))))
            kinds = [kind for kind in (float, int, bool) if kind.__name__ in names]
            # Text, lists and what has a maker of its own are for their reader to check.
            if names <= {"float", "int", "bool", "None"} and (value is not None or "None" not in names):
                check_kind(f"trainer.{name}", value, kinds[0](), ", or null" * ("None" in names))
        elif name != "_target_":
            hint = did_you_mean(name, {field: f"trainer.{field}" for field in fields})
            raise UserError(f"trainer.{name} is not a field of DrGRPOConfig, see trl.GRPOConfig{hint}")


def _check_sharding(trainer: DrGRPOTrainer) -> None:
    """Raises ValueError when the launcher asked for DeepSpeed or FSDP and accelerate made DDP of it, silently."""
    for name, got in (("DEEPSPEED", trainer.is_deepspeed_enabled), ("FSDP", trainer.is_fsdp_enabled)):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}") and not got:
            raise UserError(
                f"{name} was asked for, and accelerate gives DDP instead: FSDP never runs on the CPU, and DeepSpeed "
                "only where ACCELERATE_USE_CPU is not set (set DS_ACCELERATOR=cpu instead, see launch/zero2.yaml)"
            )
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.state_dict_type.name != "FULL_STATE_DICT":
        raise UserError(
            "fsdp_state_dict_type: SHARDED_STATE_DICT writes checkpoints without model.safetensors, which cannot be "
            "read here: use FULL_STATE_DICT (launch/fsdp2.yaml)"
        )


def _check_longest_prompt(trainer: DrGRPOTrainer) -> None:
    """Raises ValueError when a prompt and its response do not fit into the model's positions: it would train on."""
    positions = getattr(trainer.model.config, "max_position_embeddings", None)
    prompts = [row for row in trainer.train_dataset["prompt"] if isinstance(row, str)]  # a chat needs its template
    if positions is None or not prompts:
        return
    length = len(trainer.processing_class(max(prompts, key=len)).input_ids) + trainer.args.max_completion_length
    if length > positions:
        raise UserError(
            f"the longest prompt and trainer.max_completion_length={trainer.args.max_completion_length} need {length} "
            f"tokens, and the model has {positions} positions: leave out long prompts, or lower the length of responses"
        )


def _warn_of_rounding(trainer: DrGRPOTrainer) -> None:
    """Warns where the trained weights are kept in 16 bits; DeepSpeed keeps an fp32 copy of its own."""
    rounded = {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad and p.dtype.itemsize < 4}
    if rounded and not trainer.is_deepspeed_enabled:
        logger.warning(
            f"all weights are trained and kept in {', '.join(rounded).replace('torch.', '')}, which loses small "
            "changes of a weight (below 0.2 % in bfloat16); reinforcement learning makes smaller ones: use "
            "model.dtype=float32 (trainer.bf16 still computes in bf16), or adapter=lora, whose adapter is fp32"
        )
