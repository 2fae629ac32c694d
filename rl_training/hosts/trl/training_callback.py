"""Measures each training of a trainer, from its call of `train()` until the line that says how it ended.

    running          around `train()`
    on_train_begin   chooses the folder, starts the driver, and begins the records
    on_step_…        a step, as the trainer's callbacks report it; the hooks report what lies between them
    on_train_end     takes the driver's hooks off the optimizer, and frees what ranks share
    end              writes the report and that line: after `train()`, or later in a `with` block

Each training has a Training of its own, which all that measure, log or save know while it lasts.

The guard runs whatever measures here: its errors end measuring and not training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl import announcements
from rl_training.hosts.trl.guard import Guard
from rl_training.hosts.trl.hooks.training_step import StepHooks
from rl_training.hosts.trl.measured_trainer import MeasuredTrainer
from rl_training.hosts.trl.output.destination import Destination
from rl_training.hosts.trl.settings.recorded import settings_of_trainer
from rl_training.hosts.trl.trainer_log import TrainerLog
from rl_training.hosts.trl.training import Training
from rl_training.records.files.masking import mask_line

logger = logging.get_logger(__name__)


class TrainingCallback(TrainerCallback):
    """Begins, reports and ends one training after the other.

    Args:
        measured: The trainer.
        step_hooks: Report the training and its steps to the driver.
        guard: Runs measuring code of the current training.
        writer: Writes the estimates.
        log: Writes the lines of metrics.jsonl.
        destination: Where trainings write.

    Attributes:
        has_run: Whether `train()` was called.
        options: The options of the attachment.
    """

    def __init__(
        self,
        measured: MeasuredTrainer,
        step_hooks: StepHooks,
        guard: Guard,
        writer: EstimateWriter,
        log: TrainerLog,
        destination: Destination,
    ) -> None:
        self._trainer = measured.trainer
        self.options = measured.options
        self._step_hooks = step_hooks
        self._guard = guard
        self._writer = writer
        self._log = log
        self._destination = destination
        self.has_run = False
        self._has_stepped = False  # in any training

    @property
    def _training(self) -> Training:
        return self._guard.training

    # --- around a training --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Surround `train()`. Whatever ends it, the line of its last step is written."""
        with self._guard.watching():
            self.end(None)  # an earlier training in the same `with` block
        self.has_run = True
        self._guard.begin(Training())
        self._log.begin()
        self._writer.begin_training(None)  # until its folder is locked
        try:
            yield
        except BaseException as error:
            self._training.failure = announcements.how_it_ended(self._trainer, error)
            # The step fails at once: the trainer may train again before a `with` block ends.
            for end in (self._step_hooks.fail, self._write_last_line):
                with self._guard.after_error(error):
                    end()
            with self._guard.after_error(error):
                self._destination.note_interrupt(error)
            raise
        with self._guard.watching():
            self._write_last_line()
        self._end_if_told(failure="")

    def _write_last_line(self) -> None:
        try:
            self._log.flush()
        finally:
            self._destination.trained()

    def end(self, error: BaseException | None) -> None:
        """Write what is left, then the report, and unlock the folder, even if the disk is full.

        If SIGTERM has arrived, it then ends the process. Nothing is left to do for a training that has ended.

        Args:
            error: The error that ends the training or its `with` block.
        """
        try:
            self._write_report(error)
        except Exception as failure:
            if self._destination.is_told_to_end:  # nobody is left to say it
                why = mask_line(f"{type(failure).__name__}: {failure}")
                logger.warning(f"not all that was measured is in the records and the report ({why})")
            raise
        finally:
            self._destination.obey_signal()

    def _write_report(self, error: BaseException | None) -> None:
        try:
            self._log.flush()
        finally:
            if line := self._training.end(announcements.how_it_ended(self._trainer, error)):
                self._show_closing_line(line, error)

    def _show_closing_line(self, line: str, error: BaseException | None) -> None:
        """Say how training ended and where the report is: in the log, and below the traceback of an error."""
        line += announcements.how_to_resume(self._trainer) if self._training.failure else ""
        logger.warning(line)
        if error is not None:
            error.add_note(line)

    def _end_if_told(self, failure: str = "was told to end (SIGTERM)") -> None:
        """Write the report and end the process, if SIGTERM has arrived on any rank. Collective.

        Called where nothing is half written.

        Args:
            failure: What the signal does to the training, in words. "" if it has finished.
        """
        if self._destination.agree_to_end():
            self._training.failure = announcements.how_it_ended(self._trainer, failure) if failure else ""
            self.end(None)

    # --- begin --------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._refuse_restart(state)
        settings: dict[str, Any] = {}
        with announcements.hide_progress_bar():
            with self._guard.watching():
                self._begin_output()
            with self._guard.watching():
                settings = settings_of_trainer(self._trainer, self.options.recorded)
                if self._training.output is not None:
                    self._training.output.write_config(settings, self._writer.probes)
                if not self._guard.reason:
                    self._step_hooks.begin(self._destination.output, self._training.resumed.states)
            with self._guard.watching():
                self._training.begin_records(state.global_step, settings)
                self._guard.write_early_error()

    def _refuse_restart(self, state: Any) -> None:
        """Raise UserError if a second training would go on with the records and running sums of the first."""
        would_restart = self._has_stepped and state.global_step == 0 and not self._destination.has_own_folders
        if would_restart and (self._writer.probes or self._destination.records is not None):
            anew = "make a new trainer" if self.options.keep_attached else "remove() these probes and attach new ones"
            raise UserError(
                "this trainer has trained before, so its records and running sums would restart midway: continue "
                f"with train(resume_from_checkpoint=...), or {anew}"
            )

    def _begin_output(self) -> None:
        """Choose and lock the folder to write to."""
        self._step_hooks.end()  # of the previous training, if an exception has ended it
        self._training.begin_output(self._destination)
        self._writer.begin_training(self._destination.records)

    # --- a step -------------------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guard.watching():
            self._log.flush()
        self._training.step = state.global_step + 1
        with self._guard.watching():
            self._end_if_told()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_hooks.refuse_an_unseen_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guard.attempt(self._step_hooks.stepped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_stepped = True
        step = state.global_step
        result = self._guard.attempt(lambda: self._writer.finish(step))
        with self._guard.watching():
            if self._guard.reason:
                self._writer.write_missing(step, self._guard.reason)
            self._log.add({} if result is None else result.numbers)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        with self._guard.watching():
            if "loss" in logs:
                self._log.write(state.global_step, logs)
            elif "eval_loss" in logs:  # the summary at the end of training has neither
                self._log.write_evaluation(state.global_step, logs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guard.watching():
            self._end_if_told()  # an evaluation may last longer than a step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for end in (self._step_hooks.end, self._log.flush, self._step_hooks.release):
            with self._guard.watching():
                end()
