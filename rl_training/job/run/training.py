"""A training run: built from its configuration, trained, reported and ended, either normally or by a signal."""

from __future__ import annotations

import contextlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.hosts.trl.announcements import how_it_ended
from rl_training.hosts.trl.output.run_folder import RunFolder
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.job.configuration.overrides import root_key
from rl_training.job.configuration.prepare import PreparedRun
from rl_training.job.configuration.run_settings import prompt_order_changes
from rl_training.job.errors import Interrupted, as_user_errors
from rl_training.job.objects.dashboards import MetricsLogger, install_loggers
from rl_training.job.objects.make import make
from rl_training.job.objects.trainer import make_trainer
from rl_training.job.objects.trainer_checks import check_fields
from rl_training.job.run.folder import RunStart, open_run_folder, save_config
from rl_training.job.run.progress import StepProgress
from rl_training.job.run.stopping import StopAtStepEnd
from rl_training.job.run.waiting import timeouts_explained
from rl_training.records.checkpoints import steps_taken
from rl_training.records.core_metrics import CORE
from rl_training.records.files.masking import without_secrets
from rl_training.records.hydra_text import quote_override
from rl_training.records.made_by import JOB, MADE_BY
from rl_training.records.provenance import provenance
from rl_training.records.report import print_summary

logger = logging.get_logger(__name__)

EVAL_BATCH = 4  # microbatches per evaluation batch, which needs no memory for a backward pass


@dataclass(frozen=True)
class TrainingRun:
    """A training run that is ready to start."""

    trainer: DrGRPOTrainer
    run_folder: RunFolder
    checkpoint: Path | None  # to resume from
    loggers: list[MetricsLogger]  # dashboards; on the main process only
    progress: StepProgress  # shows nothing where it is switched off
    stop: StopAtStepEnd

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.run_folder.folder

    def train(self) -> None:
        """Train, starting from the checkpoint if there is one.

        If the checkpoint already has all max_steps steps, do nothing, because training would add a step. A signal ends
        training after the current step; see `end`.

        Raises:
            UserError: If no step was taken.
        """
        taken = steps_taken(self.checkpoint) if self.checkpoint else 0
        for dashboard in self.loggers:
            dashboard.start(after_step=taken)
        if 0 < self.trainer.args.max_steps <= taken:
            logger.warning(f"{self.run_dir} has taken its {taken} steps: raise trainer.max_steps to train longer")
            return
        with (
            contextlib.closing(self.progress),
            self.stop.listening(),
            as_user_errors(unless=lambda: self.trainer.state.global_step > taken),
            timeouts_explained(self.trainer.args.ddp_timeout),
        ):
            try:
                self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
            except BaseException as error:
                if self.trainer.state.global_step > taken and self.trainer.accelerator.is_main_process:
                    error.add_note(self.run_folder.closing_line(how_it_ended(self.trainer, error)))
                raise
        if self.trainer.state.global_step <= taken:
            raise UserError("nothing was trained, not one step: is the training set too small for a step?")

    def report(self) -> None:
        """Write report/report.html, print the summary and close the dashboards. Only the main process does this."""
        if not self.trainer.accelerator.is_main_process:
            return
        pictures: list[Path] = []
        try:
            pictures = self.run_folder.write_report(pictures="png" if self.loggers else "").pictures
            print_summary(self.run_dir)
        except UserError as error:
            logger.warning(str(error))
        for dashboard in self.loggers:
            dashboard.finish(pictures=pictures)

    def end(self) -> None:
        """Release the lock of the run folder.

        Raises:
            Interrupted: If a signal has stopped the run; the message says how to resume.
        """
        self.run_folder.release()
        if not self.stop.signum:
            return
        self.trainer.accelerator.wait_for_everyone()  # a launcher kills the other processes when one exits
        state = self.trainer.state
        line = f"ended by {signal.Signals(self.stop.signum).name} after step {state.global_step} of {state.max_steps}"
        if state.global_step < state.max_steps:
            line += f"; to continue, repeat the command with this appended: {self._resuming()}"
        raise Interrupted(self.stop.signum, line)

    def _resuming(self) -> str:
        """Return overrides that make the same command resume this run. The last override of a setting wins."""
        words = [quote_override("run_dir", str(self.run_dir)), "resume=latest"]
        if any(root_key(word) == "additional_steps" for word in sys.argv[1:]):  # would be added again
            words += ["additional_steps=null", f"trainer.max_steps={self.trainer.state.max_steps}"]
        return " ".join(words)


def build_run(prepared: PreparedRun) -> TrainingRun:
    """Return the training run that these settings describe. Those of a branch come from `resolve_branch`. Collective.

    Raises:
        UserError: For settings that TRL, the launcher, the run folder or the objects refuse.
    """
    logging.disable_progress_bar()  # transformers' bars for files would interrupt the bar of the steps
    with as_user_errors():
        return _build(prepared)


def _build(prepared: PreparedRun) -> TrainingRun:
    cfg = prepared.cfg.copy()
    check_fields(cfg.trainer)
    start = open_run_folder(cfg)
    cfg.run_dir = str(start.path)
    _set_last_step(cfg, start)
    trainer = _trainer_of(cfg, prepared.num_microbatches, start.run_folder)
    if start.checkpoint is not None and not start.checkpoint.resolve().is_relative_to(start.path.resolve()):
        _branch_off(trainer, cfg)
    progress = StepProgress()
    stop = StopAtStepEnd()
    for callback in (stop,) if trainer.args.disable_tqdm else (progress, stop):
        trainer.add_callback(callback)
    config = _stored_config(cfg, trainer)
    save_config(config, start.path, start.is_resumed)
    loggers = install_loggers(trainer, start.path, config, CORE if cfg.logger.metrics == "core" else None)
    return TrainingRun(trainer, start.run_folder, start.checkpoint, loggers, progress, stop)


def _set_last_step(cfg: DictConfig, start: RunStart) -> None:
    """Add `additional_steps` to the checkpoint's steps, so that config.yaml has the last step in trainer.max_steps.

    Raises:
        UserError: If a branch has no step left to take.
    """
    taken = start.step
    if start.checkpoint is not None and cfg.additional_steps is not None:
        cfg.trainer.max_steps = taken + cfg.additional_steps
        cfg.additional_steps = None
    if not start.is_resumed and 0 < cfg.trainer.max_steps <= taken:
        raise UserError(
            f"branch={start.checkpoint} has taken {taken} steps, and trainer.max_steps={cfg.trainer.max_steps}: give a "
            "larger one, or additional_steps=20"
        )


def _trainer_of(cfg: DictConfig, num_microbatches: int, run_folder: RunFolder) -> DrGRPOTrainer:
    """Return the trainer, which writes its records into the run folder.

    Args:
        cfg: Configuration of the run.
        num_microbatches: Number of microbatches per step on each process.
        run_folder: The run folder.
    """
    evaluated_at_once = cfg.trainer.get("per_device_eval_batch_size", EVAL_BATCH * cfg.batch.microbatch_size)
    args = make(
        "trainer",
        cfg.trainer,
        gradient_accumulation_steps=num_microbatches,
        per_device_eval_batch_size=evaluated_at_once,
    )
    probes = [make(f"probes.{name}", probe) for name, probe in cfg.probes.items()]
    records = run_folder.records(cfg.rollouts.every) if PartialState().is_main_process else None
    return make_trainer(cfg, args, probes, records, with_evaluation=args.eval_strategy != "no")


def _branch_off(trainer: DrGRPOTrainer, cfg: DictConfig) -> None:
    """Let the trainer continue from another run's checkpoint; warn if its order of prompts differs from that run's."""
    changed = prompt_order_changes(cfg)
    trainer.resume_as_branch(has_own_rng="seed=" in changed)
    if changed:
        logger.warning(f"{changed}: this branch takes its prompts in another order than its run")


def _stored_config(cfg: DictConfig, trainer: DrGRPOTrainer) -> dict[str, Any]:
    """Return the content of config.yaml and the dashboards: all settings without secrets, and the run's provenance."""
    config: dict[str, Any] = {MADE_BY: JOB} | without_secrets(OmegaConf.to_container(cfg, resolve=True))
    config["provenance"] = provenance() | {"loss": trainer.loss_description}
    if cfg.get("branch") is not None:
        branch = Path(cfg.branch)
        config["provenance"]["branch"] = f"of {branch.parents[1].name} at step {steps_taken(branch)}"
    return config
