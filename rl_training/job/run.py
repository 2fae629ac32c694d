"""A run: trains, with a bar of its steps, reports, and ends, well or where a signal has stopped it.

SIGINT (Ctrl-C), SIGTERM (Slurm before it preempts, `kill`) and a launcher that is gone ask for its end: it finishes its
step and writes a checkpoint that resumes exactly. Of several processes one request is enough: they agree at the end of
each step. A second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import ProgressCallback, TrainerCallback
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.hosts.trl.batches import steps_per_rollout
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.job.command_line import LAUNCHED, SIGNALS, Interrupted, libraries_refuse
from rl_training.job.explain import quoted
from rl_training.job.loggers import MetricsLogger
from rl_training.job.run_folder import release_run_folder
from rl_training.job.waiting import timeouts_explained
from rl_training.records.checkpoints import steps_taken
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report import print_summary, write_report

logger = logging.get_logger(__name__)

SECONDS_OF_ECHO = 2.0  # a launcher passes on what the terminal has sent to all: not a second signal
# By label, the metrics that it can be and how it is written. Entropy over all tokens, as in the report, where a probe
# measures it.
SHOWN = {
    "reward": (("reward",), ".3f"),
    "entropy": (("entropy/token", "entropy"), ".3f"),
    "δH": (("delta_h/forward", "measured/delta_h"), "+.4f"),
}
Z_95 = 1.96  # standard errors, of the number that has one
# Without tqdm's rate, and with a bar of fixed width, all numbers fit into 80 columns.
FORMAT = "{percentage:3.0f}%|{bar:3}| {n_fmt}/{total_fmt}{desc} [{elapsed}<{remaining}{postfix}]"
SECONDS_OF_SILENCE = 10.0  # after which a step that is not through says how far it is
BEFORE_ANY = "sampling"  # in the place of the numbers, until the first step is through


class StopAtStepEnd(TrainerCallback):
    """Ends training after the step in which a signal has come; `signum` then says which one, else it is 0."""

    def __init__(self) -> None:
        self.signum = 0
        self._request = 0  # of this process
        self._requested_at = 0.0
        was_launched = any(name in os.environ for name in LAUNCHED)
        self._launcher = os.getppid() if was_launched else None  # a shell may end before this process does

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context that handles signals; outside of it they act as before."""
        if threading.current_thread() is not threading.main_thread():  # where Python forbids handlers
            yield
            return
        before = {signum: signal.signal(signum, self._take) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._request and now - self._requested_at > SECONDS_OF_ECHO:
            self._say(f"ended by {signal.Signals(signum).name}")
            os._exit(128 + signum)  # of several processes, those that clean up first would wait for one another
        if not self._request:
            self._request, self._requested_at = signum, now
            self._say(
                f"{signal.Signals(signum).name}: after this step a checkpoint and the report; a second one ends at once"
            )

    def _say(self, line: str) -> None:
        if PartialState().is_main_process:
            os.write(2, f"\n{line}\n".encode())  # print may be in the middle of something

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._launcher not in (None, os.getppid()) and not self._request:
            self._request = signal.SIGTERM
            self._say("the launcher is gone: a checkpoint and the report, then this run ends")
        own = torch.tensor([self._request], device=PartialState().device)
        request = int(gather(own).max())
        # A rollout that later steps use is not saved: training goes on exactly only from where one ends.
        if request and state.global_step % steps_per_rollout(args) == 0:
            self.signum = request
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False


class StepProgress(ProgressCallback):
    """transformers' bar with these numbers in it: one line that is redrawn at each step, on the main process.

    In a step that takes long it is redrawn after microbatches, too, and says which: "1/16 +3/8".
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._lines = contextlib.ExitStack()
        self._lines.enter_context(logging_redirect_tqdm())  # else what is logged stands behind the bar
        self.current_step = state.global_step
        if self.training_bar is not None:
            self.training_bar.bar_format = FORMAT
            self.training_bar.initial = self.training_bar.n = state.global_step
            self.training_bar.set_postfix_str(BEFORE_ANY)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._microbatches = 0
        self._drawn_at = time.monotonic()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._microbatches += 1
        if self.training_bar is not None and time.monotonic() - self._drawn_at > SECONDS_OF_SILENCE:
            self._drawn_at = time.monotonic()
            self.training_bar.set_description_str(f" +{self._microbatches}/{args.gradient_accumulation_steps}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.set_description_str("", refresh=False)
            if self.training_bar.postfix == BEFORE_ANY:
                self.training_bar.set_postfix_str("", refresh=False)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {}
        for label, (keys, form) in SHOWN.items():
            key = next((key for key in keys if logs.get(key) is not None), None)
            if key is not None:
                stderr = logs.get(f"{key}_se")
                bar = "" if stderr is None else f"±{Z_95 * stderr:{form.lstrip('+')}}"
                shown[label] = f"{logs[key]:{form}}{bar}"
        if shown and self.training_bar is not None:
            self.training_bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        self._lines.close()


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
        named = timeouts_explained(self.trainer.args.ddp_timeout)
        with self.stop.listening(), libraries_refuse(unless=lambda: self.trainer.state.global_step > taken), named:
            self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        if self.trainer.state.global_step <= taken:
            raise UserError("nothing was trained, not one step: is the training set too small for a step?")

    def report(self) -> None:
        """Writes report/report.html, prints the summary and closes the dashboards, on the main process."""
        if self.trainer.accelerator.is_main_process:
            if not (self.run_dir / LOGS_FOLDER / METRICS_FILE).is_file():
                logger.warning("no report: no step was logged (trainer.logging_steps, trainer.logging_strategy)")
                return
            page = write_report(self.run_dir, pictures="png" if self.loggers else "")
            for dashboard in self.loggers:
                dashboard.finish(pictures=sorted(page.parent.glob("*.png")))
            print_summary(self.run_dir)

    def end(self) -> None:
        """Frees the run's folder. Raises Interrupted, with the line that resumes, when a signal has stopped the run."""
        release_run_folder(self.run_dir)
        if not self.stop.signum:
            return
        self.trainer.accelerator.wait_for_everyone()  # a launcher ends the others as soon as one is gone
        state = self.trainer.state
        line = f"ended by {signal.Signals(self.stop.signum).name} after step {state.global_step} of {state.max_steps}"
        if state.global_step < state.max_steps:
            line += f"; to go on, type the same command with this behind it: {self._resuming()}"
        raise Interrupted(self.stop.signum, line)

    def _resuming(self) -> str:
        """Returns the settings that let the command that was typed go on with this run: the last of a kind counts."""
        run_dir = str(self.run_dir)
        folder = f"run_dir={run_dir}" if re.fullmatch(r"[\w./-]+", run_dir, re.ASCII) else quoted("run_dir", run_dir)
        words = [folder, "resume=latest"]
        if any(word.startswith("additional_steps=") for word in sys.argv[1:]):  # would be added once more
            words += ["additional_steps=null", f"trainer.max_steps={self.trainer.state.max_steps}"]
        return " ".join(words)
