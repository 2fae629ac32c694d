"""A training: built from its configuration, trained, reported, and ended, well or where a signal has stopped it."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.hosts.trl.run_folder import RunFolder
from rl_training.hosts.trl.spoken import how_it_ended
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.job.configuration.checks import check_run
from rl_training.job.configuration.run_settings import prompt_order_changes
from rl_training.job.configuration.values import quoted
from rl_training.job.errors import Interrupted, as_user_errors
from rl_training.job.objects.dashboards import MetricsLogger, put_loggers
from rl_training.job.objects.make import make
from rl_training.job.objects.trainer import make_trainer
from rl_training.job.objects.trainer_checks import check_fields
from rl_training.job.run.folder import find_run_folder, save_config
from rl_training.job.run.progress import StepProgress
from rl_training.job.run.stopping import StopAtStepEnd
from rl_training.job.run.waiting import timeouts_explained
from rl_training.records.checkpoints import steps_taken
from rl_training.records.files.masking import without_secrets
from rl_training.records.provenance import provenance
from rl_training.records.report import print_summary
from rl_training.records.workspace import CORE

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class TrainingRun:
    """A run, ready to start."""

    trainer: DrGRPOTrainer
    folder: RunFolder
    checkpoint: Path | None  # to resume from
    loggers: list[MetricsLogger]  # dashboards; on the main process only
    stop: StopAtStepEnd

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.folder.folder

    def train(self) -> None:
        """Train, from the checkpoint if there is one; not if that is the last step's, where it would add a step.

        A signal ends the training after the step that it came in: see `end`.

        Raises:
            UserError: when no step was taken.
        """
        taken = steps_taken(self.checkpoint) if self.checkpoint else 0
        for dashboard in self.loggers:
            dashboard.start(after_step=taken)
        if 0 < self.trainer.args.max_steps <= taken:
            logger.warning(f"{self.run_dir} has taken its {taken} steps: raise trainer.max_steps to train longer")
            return
        named = timeouts_explained(self.trainer.args.ddp_timeout)
        with self.stop.listening(), as_user_errors(unless=lambda: self.trainer.state.global_step > taken), named:
            try:
                self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
            except BaseException as error:
                if self.trainer.state.global_step > taken and self.trainer.accelerator.is_main_process:
                    error.add_note(self.folder.closing_line(how_it_ended(self.trainer, error)))
                raise
        if self.trainer.state.global_step <= taken:
            raise UserError("nothing was trained, not one step: is the training set too small for a step?")

    def report(self) -> None:
        """Write report/report.html, print the summary and close the dashboards, on the main process."""
        if not self.trainer.accelerator.is_main_process:
            return
        pictures: list[Path] = []
        try:
            page = self.folder.write_report(pictures="png" if self.loggers else "")
            pictures = sorted(page.parent.glob("*.png"))
            print_summary(self.run_dir)
        except UserError as error:
            logger.warning(str(error))
        for dashboard in self.loggers:
            dashboard.finish(pictures=pictures)

    def end(self) -> None:
        """Free the run's folder.

        Raises:
            Interrupted: with the line that resumes, when a signal has stopped the run.
        """
        self.folder.release()
        if not self.stop.signum:
            return
        self.trainer.accelerator.wait_for_everyone()  # a launcher ends the others as soon as one is gone
        state = self.trainer.state
        line = f"ended by {signal.Signals(self.stop.signum).name} after step {state.global_step} of {state.max_steps}"
        if state.global_step < state.max_steps:
            line += f"; to go on, type the same command with this behind it: {self._resuming()}"
        raise Interrupted(self.stop.signum, line)

    def _resuming(self) -> str:
        """Return the settings that let the command that was typed go on with this run: the last of a kind counts."""
        run_dir = str(self.run_dir)
        folder = f"run_dir={run_dir}" if re.fullmatch(r"[\w./-]+", run_dir, re.ASCII) else quoted("run_dir", run_dir)
        words = [folder, "resume=latest"]
        if any(word.startswith("additional_steps=") for word in sys.argv[1:]):  # would be added once more
            words += ["additional_steps=null", f"trainer.max_steps={self.trainer.state.max_steps}"]
        return " ".join(words)


EVAL_BATCH = 4  # microbatches at once in evaluation, which keeps nothing for a backward


def build_run(cfg: DictConfig) -> TrainingRun:
    """Return the run that the configuration describes, of a branch as `branched` returns it.

    Raises:
        UserError: for whatever the user got wrong.
    """
    logging.disable_progress_bar()  # transformers' over files, in the middle of the one over steps
    with as_user_errors():
        return _build(cfg)


def _build(cfg: DictConfig) -> TrainingRun:
    check_fields(cfg.trainer)
    accumulation = check_run(cfg)
    folder, checkpoint, is_its_own = find_run_folder(cfg)
    cfg.run_dir = str(folder.folder)
    trainer = _trainer_of(cfg, accumulation, folder)
    if checkpoint is not None and not checkpoint.resolve().is_relative_to(folder.folder.resolve()):
        _branch_off(trainer, cfg)
    stop = _add_callbacks(trainer)
    config = _stored_config(cfg, trainer)
    save_config(config, folder.folder, is_its_own)
    loggers = put_loggers(trainer, folder.folder, config, CORE if cfg.logger.metrics == "core" else None)
    return TrainingRun(trainer, folder, checkpoint, loggers, stop)


def _trainer_of(cfg: DictConfig, accumulation: int, folder: RunFolder) -> DrGRPOTrainer:
    """Return the trainer, which writes its records into the run's folder.

    Args:
        cfg: The configuration.
        accumulation: Microbatches of a step on each process.
        folder: The run's.
    """
    evaluated_at_once = cfg.trainer.get("per_device_eval_batch_size", EVAL_BATCH * cfg.batch.microbatch_size)
    args = make(
        "trainer", cfg.trainer, gradient_accumulation_steps=accumulation, per_device_eval_batch_size=evaluated_at_once
    )
    probes = [make(f"probes.{name}", probe) for name, probe in cfg.probes.items()]
    records = folder.records(cfg.rollouts.every) if PartialState().is_main_process else None
    trainer = make_trainer(cfg, args, probes, records, with_evaluation=args.eval_strategy != "no")
    trainer.attachment.is_typed = True
    return trainer


def _branch_off(trainer: DrGRPOTrainer, cfg: DictConfig) -> None:
    """Let the trainer go on from another run's checkpoint, and say where it takes other prompts than that run."""
    trainer.branches_off = True
    if changed := prompt_order_changes(cfg):
        trainer.has_own_random_numbers = "seed=" in changed
        logger.warning(f"{changed}: this branch takes its prompts in another order than its run")


def _add_callbacks(trainer: DrGRPOTrainer) -> StopAtStepEnd:
    """Show the training's steps in a bar if one is asked for, and return what ends it at a signal."""
    if not trainer.args.disable_tqdm:
        trainer.add_callback(StepProgress)
    stop = StopAtStepEnd()
    trainer.add_callback(stop)
    return stop


def _stored_config(cfg: DictConfig, trainer: DrGRPOTrainer) -> dict[str, Any]:
    """Return what config.yaml and the dashboards hold: all settings without secrets, and where the run comes from."""
    config: dict[str, Any] = without_secrets(OmegaConf.to_container(cfg, resolve=True))
    config["provenance"] = provenance() | {"loss": trainer.loss_in_words}
    if cfg.get("branch") is not None:
        branch = Path(cfg.branch)
        config["provenance"]["branch"] = f"of {branch.parents[1].name} at step {steps_taken(branch)}"
    return config
