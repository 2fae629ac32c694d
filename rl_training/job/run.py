"""A run: trains, reports, and ends, well or where a signal has stopped it."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.job.command_line import Interrupted, libraries_refuse
from rl_training.job.explain import quoted
from rl_training.job.loggers import MetricsLogger
from rl_training.job.stopping import StopAtStepEnd
from rl_training.records.checkpoints import steps_taken
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report import print_summary, write_report

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class TrainingRun:
    """A run, ready to start."""

    trainer: DrGRPOTrainer
    run_dir: Path
    checkpoint: Path | None  # to resume from
    loggers: list[MetricsLogger]  # dashboards; on the main process only
    stop: StopAtStepEnd

    def train(self) -> None:
        """Trains, from the checkpoint if there is one; not if that is the last step's, where it would add a step.

        Raises ValueError when no step was taken. A signal ends it after the step that it came in: see `end`.
        """
        taken = steps_taken(self.checkpoint) if self.checkpoint else 0
        for dashboard in self.loggers:
            dashboard.start(after_step=taken)
        if 0 < self.trainer.args.max_steps <= taken:
            logger.warning(f"{self.run_dir} has taken its {taken} steps: raise trainer.max_steps to train longer")
            return
        with self.stop.listening(), libraries_refuse(unless=lambda: self.trainer.state.global_step > taken):
            self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        if self.trainer.state.global_step <= taken:
            raise ValueError("nothing was trained, not one step: is the training set too small for a step?")

    def report(self) -> None:
        """Writes report/report.html, prints the summary and closes the dashboards, on the main process."""
        if self.trainer.accelerator.is_main_process:
            if not (self.run_dir / LOGS_FOLDER / METRICS_FILE).is_file():
                logger.warning("no report: no step was logged (trainer.logging_steps, trainer.logging_strategy)")
                return
            page = write_report(self.run_dir)
            for dashboard in self.loggers:
                dashboard.finish(pictures=sorted(page.parent.glob("*.png")))
            print_summary(self.run_dir)

    def end(self) -> None:
        """Raises Interrupted, with the line that resumes, when a signal has stopped the run."""
        if not self.stop.signum:
            return
        self.trainer.accelerator.wait_for_everyone()  # a launcher ends the others as soon as one is gone
        state = self.trainer.state
        line = f"ended by {signal.Signals(self.stop.signum).name} after step {state.global_step} of {state.max_steps}"
        if state.global_step < state.max_steps:
            line += f"; go on with: {self._resuming()}"
        raise Interrupted(self.stop.signum, line)

    def _resuming(self) -> str:
        """Returns the command that resumes this run, as it was typed except where it has to change."""
        given = [arg.removeprefix("++") for arg in sys.argv[1:] if not re.match(r"\+*(run_dir|resume)=", arg)]
        if any(arg.startswith("additional_steps=") for arg in given):  # would be added once more
            given = [arg for arg in given if not arg.startswith(("additional_steps=", "trainer.max_steps="))]
            given.append(f"trainer.max_steps={self.trainer.state.max_steps}")
        run_dir = str(self.run_dir)
        folder = f"run_dir={run_dir}" if re.fullmatch(r"[\w./-]+", run_dir, re.ASCII) else quoted("run_dir", run_dir)
        return " ".join([self.stop.launch.typed, *map(shlex.quote, given), folder, "resume=latest"])
