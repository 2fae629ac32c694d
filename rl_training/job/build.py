"""From the composed configuration to the objects of a run. The only file that reads `cfg` and calls instantiate."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import PrinterCallback, ProgressCallback, set_seed
from transformers.utils import logging

from rl_training.job.command_line import in_one_line, is_foreseen
from rl_training.job.settings import CONFIG_FILE, check_settings, refuse_other_settings
from rl_training.live.trainer import DrGRPOConfig, DrGRPOTrainer
from rl_training.offline.standing import Standing, stand
from rl_training.probes.base import Probe
from rl_training.records.checkpoints import TRAINING_STATE, find_checkpoint, set_aside_later, steps_taken
from rl_training.records.jsonl import METRICS_FILE, Records
from rl_training.records.loggers import LOGGERS, MetricsLogger
from rl_training.records.progress import StepProgress
from rl_training.records.report import print_summary, write_report

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Run:
    """A run, ready to start."""

    trainer: DrGRPOTrainer
    run_dir: Path
    checkpoint: Path | None  # to resume from
    loggers: list[MetricsLogger]  # dashboards; on the main process only

    def train(self) -> None:
        """Trains, from the checkpoint on if there is one; not where that is the last step's: it would add a step."""
        taken = steps_taken(self.checkpoint) if self.checkpoint else 0
        for dashboard in self.loggers:
            dashboard.start(after_step=taken)
        if 0 < self.trainer.args.max_steps <= taken:
            logger.warning(f"{self.run_dir} has taken its {taken} steps: a larger trainer.max_steps trains longer")
        else:
            self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)

    def report(self) -> None:
        """Writes report/report.html, prints the summary and closes the dashboards, on the main process."""
        if self.trainer.accelerator.is_main_process:
            if not (self.run_dir / "logs" / METRICS_FILE).is_file():
                logger.warning("no report: no step was logged (trainer.logging_steps, trainer.logging_strategy)")
                return
            page = write_report(self.run_dir)
            for dashboard in self.loggers:
                dashboard.finish(pictures=sorted(page.parent.glob("*.png")))
            print_summary(self.run_dir)


def build_run(cfg: DictConfig) -> Run:
    """Returns the run that the configuration describes. Raises ValueError for whatever the user got wrong."""
    with _libraries_refuse():
        return _build(cfg)


@contextlib.contextmanager
def _libraries_refuse() -> Iterator[None]:
    """A context in which whatever a library raises is a ValueError: nothing runs yet, so it is what was asked for."""
    try:
        yield
    except Exception as error:
        if is_foreseen(error):
            raise
        raise ValueError(f"{in_one_line(error)} (--debug shows where)") from error


def _build(cfg: DictConfig) -> Run:
    check_settings(cfg)
    accumulation = accumulation_steps(
        cfg.batch.sequences_per_step,
        cfg.batch.microbatch_size,
        num_processes=int(os.environ.get("WORLD_SIZE", "1")),
        responses_per_prompt=cfg.trainer.num_generations,
    )
    run_dir, checkpoint = _run_folder(cfg)
    cfg.run_dir = str(run_dir)
    args = _make(cfg.trainer, gradient_accumulation_steps=accumulation)
    records = None
    if args.process_index == 0:
        records = Records(run_dir / "logs")
        OmegaConf.save(cfg, run_dir / CONFIG_FILE, resolve=True)
    probes = [_make(probe) for probe in cfg.probes.values()]
    trainer = _make_trainer(cfg, args, probes, records, with_evaluation=args.eval_strategy != "no")
    if not args.disable_tqdm:
        trainer.add_callback(StepProgress)
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    return Run(trainer, run_dir, checkpoint, _put_loggers(trainer, run_dir, config))


def build_standing(cfg: DictConfig, checkpoint: Path, learning_rate: float | None = None) -> Standing:
    """Returns a trainer of this run's configuration that stands at one of its checkpoints; it writes nothing.

    ValueError, saying what to do, where the checkpoint is not of this configuration: see standing.py.
    """
    with _libraries_refuse(), tempfile.TemporaryDirectory() as scratch:
        # One microbatch: how many the training would make of U does not matter to its mean gradient.
        cfg = cfg.copy()
        cfg.run_dir = scratch
        changes = {"report_to": [], "eval_strategy": "no", "save_strategy": "no"}
        for key, value in {"output_dir": f"{scratch}/{TRAINING_STATE}", **changes}.items():
            OmegaConf.update(cfg, f"trainer.{key}", value, force_add=True)
        check_settings(cfg)
        args = _make(cfg.trainer, gradient_accumulation_steps=1)
        _check_number_of_processes(args.world_size)
        return stand(_make_trainer(cfg, args, [], None, with_evaluation=True), checkpoint, learning_rate)


def _make_trainer(
    cfg: DictConfig, args: DrGRPOConfig, probes: list[Probe], records: Records | None, with_evaluation: bool
) -> DrGRPOTrainer:
    """Returns the trainer, with the evaluation split of its task if asked for."""
    set_seed(cfg.seed)  # before the model: an adapter's weights are drawn
    task = _make(cfg.data)
    model, tokenizer = _make(cfg.model)
    trainer = DrGRPOTrainer(
        model=model,
        reward_funcs=task.reward,
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset if with_evaluation else None,
        processing_class=tokenizer,
        peft_config=_make(cfg.adapter) or None,
        probes=probes,
        records=records,
        buffer=_make(cfg.buffer) or None,
    )
    _check_sharding(trainer)
    _check_precision(trainer)
    for callback in (ProgressCallback, PrinterCallback):  # they print every log line in full
        trainer.remove_callback(callback)
    return trainer


def _put_loggers(trainer: DrGRPOTrainer, run_dir: Path, config: dict[str, Any]) -> list[MetricsLogger]:
    """Returns this package's loggers, put in the places of those of transformers that `report_to` asked for.

    None on other processes than the main one.
    """
    kinds = [kind for kind in LOGGERS if trainer.pop_callback(kind.replaces)]
    if not trainer.accelerator.is_main_process:
        return []
    args = trainer.args
    loggers = [kind(run_dir, args.project, args.run_name or run_dir.resolve().name, config) for kind in kinds]
    for dashboard in loggers:
        trainer.add_callback(dashboard)
    return loggers


def _make(node: DictConfig, **values: Any) -> Any:
    """Returns the object that a node describes; what its maker raised is raised as it is, without Hydra's wrapping."""
    try:
        return instantiate(node, _convert_="all", **values)
    except InstantiationException as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def accumulation_steps(
    sequences_per_step: int, microbatch_size: int, num_processes: int, responses_per_prompt: int
) -> int:
    """Returns how many microbatches of each process make a step. ValueError, naming numbers that would divide."""
    if microbatch_size % responses_per_prompt:
        fitting = max(microbatch_size // responses_per_prompt, 1) * responses_per_prompt
        raise ValueError(
            f"batch.microbatch_size={microbatch_size} must hold whole prompts of "
            f"trainer.num_generations={responses_per_prompt} responses: use batch.microbatch_size={fitting}"
        )
    at_once = microbatch_size * num_processes
    if sequences_per_step % at_once or sequences_per_step < 1:
        fitting = max(round(sequences_per_step / at_once), 1) * at_once
        raise ValueError(
            f"batch.sequences_per_step={sequences_per_step} is not a multiple of batch.microbatch_size="
            f"{microbatch_size} x {num_processes} process(es) = {at_once}: use batch.sequences_per_step={fitting}"
        )
    return sequences_per_step // at_once


def _run_folder(cfg: DictConfig) -> tuple[Path, Path | None]:
    """Returns the run folder, made and the same on every process, and the checkpoint to resume from."""
    use_cpu = bool(cfg.trainer.get("use_cpu", False)) or not torch.accelerator.is_available()
    state = PartialState(cpu=use_cpu)
    _check_number_of_processes(state.num_processes)
    # Each process has its own clock, hence its own default run folder: the main one's counts.
    run_dir = Path(broadcast_object_list([cfg.run_dir])[0])
    if cfg.resume != "none":
        checkpoint = find_checkpoint(str(cfg.resume), run_dir, parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"))
        run = _run_of(checkpoint)
        if _is_given("run_dir") and run != run_dir.resolve():
            raise ValueError(f"run_dir={run_dir}, but {checkpoint} belongs to the run {run}: leave run_dir out")
        refuse_other_settings(cfg, run)
        state.wait_for_everyone()  # nothing is moved before everybody has looked
        if state.is_main_process:
            set_aside_later(run, steps_taken(checkpoint))
        return run, checkpoint
    if (run_dir / "logs" / METRICS_FILE).exists():
        raise ValueError(
            f"run_dir={run_dir} already holds a run: go on with it by resume=latest, choose another, or delete it"
        )
    state.wait_for_everyone()  # nobody creates it before everybody has looked
    try:
        (run_dir / TRAINING_STATE).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"run_dir={run_dir} cannot be written to ({error}): choose another with run_dir=PATH"
        ) from error
    return run_dir, None


def _check_number_of_processes(num_processes: int) -> None:
    """Raises ValueError when several processes were asked for and this one is alone: it would train on, silently.

    accelerate launch starts a single process without a word where it sees no several GPUs (--cpu, MULTI_CPU, or no
    configuration at all). It does not pass on the number; that it set the address to meet at gives it away.
    """
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked != num_processes:
        raise ValueError(
            f"WORLD_SIZE={asked}, but {num_processes} process(es) met: start them with accelerate launch or torchrun, "
            "or unset WORLD_SIZE"
        )
    met_alone = "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ
    if met_alone and "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise ValueError(
            "accelerate launch was asked for several processes and started only this one: use --config_file "
            "launch/cpu_ddp.yaml for several processes on the CPU, launch/ddp.yaml for several GPUs. If one process is "
            "meant: --num_processes 1, and unset MASTER_PORT"
        )


def _check_sharding(trainer: DrGRPOTrainer) -> None:
    """Raises ValueError when the launcher asked for DeepSpeed or FSDP and accelerate made DDP of it, silently."""
    for name, got in (("DEEPSPEED", trainer.is_deepspeed_enabled), ("FSDP", trainer.is_fsdp_enabled)):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}") and not got:
            raise ValueError(
                f"{name} was asked for, and accelerate gives DDP instead: FSDP never runs on the CPU, and DeepSpeed "
                "only where ACCELERATE_USE_CPU is not set (DS_ACCELERATOR=cpu says it, see launch/zero2.yaml)"
            )


def _check_precision(trainer: DrGRPOTrainer) -> None:
    """Raises ValueError when the trained weights are kept in 16 bits; DeepSpeed keeps an fp32 copy of its own."""
    rounded = {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad and p.dtype.itemsize < 4}
    if rounded and not trainer.is_deepspeed_enabled:
        raise ValueError(
            f"all weights are trained and kept in {', '.join(rounded).replace('torch.', '')}, where small changes of a "
            "weight are lost (below 0.2 % in bfloat16), and reinforcement learning makes smaller ones: use "
            "model.dtype=float32 (trainer.bf16 computes in bf16 all the same), or adapter=lora, whose adapter is fp32"
        )


def _run_of(checkpoint: Path) -> Path:
    """Returns the run folder that a checkpoint belongs to: <run>/training_state/checkpoint-N."""
    folder = checkpoint.resolve().parent
    if folder.name != TRAINING_STATE:
        raise ValueError(
            f"resume={checkpoint} is in no run folder, where it would be RUN/{TRAINING_STATE}/checkpoint-N: give one "
            "that is, or start a new run from its weights with model=hub model.name=CHECKPOINT"
        )
    return folder.parent


def _is_given(key: str) -> bool:
    """Returns whether the user has set this key on the command line."""
    return HydraConfig.initialized() and any(o.startswith(f"{key}=") for o in HydraConfig.get().overrides.task)
