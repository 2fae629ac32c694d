"""Probes on a trl.GRPOTrainer: all that lives as long as one training run. step_hooks.py has the hooks of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.engine.driver import StepDriver
from rl_training.engine.kl_bound import KLBound
from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.interrupt_note import note_interrupt
from rl_training.hosts.step_warnings import StepWarnings
from rl_training.hosts.trl import announcements, batches, compatibility
from rl_training.hosts.trl.attached_run import AttachedRun
from rl_training.hosts.trl.checkpoint_hooks import CheckpointHooks, Resumed
from rl_training.hosts.trl.guard import Guard
from rl_training.hosts.trl.loop import loop_of
from rl_training.hosts.trl.loss_settings import whole_prompts_only_reorder
from rl_training.hosts.trl.options import Options
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.recorded_settings import settings_of_probes, settings_of_trainer
from rl_training.hosts.trl.reward_functions import named_rewards
from rl_training.hosts.trl.rollouts import Rollouts
from rl_training.hosts.trl.run_folder import on_main_process
from rl_training.hosts.trl.step_hooks import StepHooks
from rl_training.hosts.trl.termination import Termination
from rl_training.hosts.trl.trained_loss import TrainedLoss
from rl_training.hosts.trl.trainer_log import TrainerLog, is_dashboard
from rl_training.hosts.trl.wrapping import wrap
from rl_training.parallel.ranks import all_ranks
from rl_training.records.claim import RecordsClaim
from rl_training.records.folder import PAGE_FILE, REPORT_FOLDER
from rl_training.records.jsonl import Records
from rl_training.records.provenance import provenance
from rl_training.statistics.estimate import Estimate
from rl_training.step.batch import LossSettings

logger = logging.get_logger(__name__)


class Attachment(TrainerCallback, contextlib.AbstractContextManager["Attachment"]):
    """Probes attached to a trainer, until `remove`. Made by `attach`."""

    def __init__(
        self, trainer: GRPOTrainer, probes: Sequence[Probe], destination: AttachedRun | Records | None, options: Options
    ) -> None:
        """Attach probes, and write to `destination`: a run folder, bare `Records`, or None to write nothing."""
        compatibility.check_version(trainer)
        if any(isinstance(callback, Attachment) for callback in trainer.callback_handler.callbacks):
            raise UserError("this trainer already has probes attached: remove() those first, or pass all in one list")
        whole_prompts = options.whole_prompts
        if whole_prompts is None:
            whole_prompts = whole_prompts_only_reorder(trainer)
        if whole_prompts:
            compatibility.refuse_split_prompts(trainer)
        self._bound = None if options.target_kl_share is None else KLBound(options.target_kl_share)
        if probes or self._bound:
            compatibility.refuse_what_cannot_be_measured(trainer)
        self._trainer = trainer
        self.driver = StepDriver(probes, self._bound)
        num_sequences = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
        self.driver.refuse_impossible_folds(num_sequences, trainer.num_generations, all_ranks().count)
        self.probes = self.driver.probes
        self._policy = TrainerPolicy(trainer)
        self.run = destination if isinstance(destination, AttachedRun) else None
        records = destination if isinstance(destination, Records) else None
        self._records_claim = None if records is None else RecordsClaim(records)
        longer_responses = f"raise {'trainer.' if options.is_cli else ''}max_completion_length"
        self._writer = EstimateWriter(self.probes, records, self._policy.decode)
        self._warnings = StepWarnings(longer_responses)
        self._log = TrainerLog(trainer, self._writer, shows_all=options.metrics == "all")
        self._loss = TrainedLoss(trainer, self._policy, options.interventions)
        self._rollouts = Rollouts(trainer, self._policy, whole_prompts)
        is_needed = bool(self.driver.is_bounded or self._loss.interventions)
        self._guard = Guard(self.driver, self._writer, training_needs_measurements=is_needed, strict=options.strict)
        self._steps = StepHooks(
            trainer, self.driver, self._policy, self._rollouts, self._loss, self._guard, self._writer
        )
        self._termination = Termination(self._write_before_the_end)
        self._was_called = False  # whether `train` has been called
        self._has_stepped = False  # whether a step has been taken
        self._has_report = False
        self._failed = ""  # how the latest training failed; its error may have been caught inside the `with` block
        self._checkpoints = CheckpointHooks(trainer, self.driver, self._guard)
        self._ends_with_training = not options.keep_attached  # False in a `with` block, whose end removes the probes
        self.is_cli = options.is_cli
        self._undo_engine = contextlib.ExitStack()
        self._undo = self._install(trainer, options.callback)

    def _install(self, trainer: GRPOTrainer, further_callback: TrainerCallback | None) -> contextlib.ExitStack:
        """Wrap the methods of the trainer that probes need to see, until the returned stack is closed."""
        with contextlib.ExitStack() as undo:
            for name, method in self._wrappers().items():
                wrap(trainer, name, method, undo)
            undo.callback(setattr, trainer, "reward_funcs", trainer.reward_funcs)
            trainer.reward_funcs = named_rewards(trainer)
            for callback in trainer.callback_handler.callbacks if self.probes else ():
                if isinstance(callback, PrinterCallback | ProgressCallback):
                    wrap(callback, "on_log", self._log.on_print, undo)
                elif is_dashboard(callback):
                    wrap(callback, "on_log", self._log.on_send, undo)
            for added in filter(None, (self, further_callback)):
                trainer.add_callback(added)
                undo.callback(trainer.remove_callback, added)
            return undo.pop_all()

    @property
    def latest(self) -> Mapping[str, Estimate]:
        """The latest estimates by name. They are the same on every rank if the probe says so."""
        return self._writer.latest

    @property
    def folder(self) -> Path | None:
        """The run folder: the one asked for, and once training has begun the one written to. None without a folder."""
        return None if self.run is None else self.run.folder

    @property
    def report(self) -> Path | None:
        """The report's page, which exists once training has ended. None without a folder."""
        return None if self.run is None else self.run.folder / REPORT_FOLDER / PAGE_FILE

    def _repr_html_(self) -> str:
        """Return the report for display in a notebook, in a self-contained frame."""
        if not self._has_report or self.report is None or not self.report.is_file():  # a page may be an earlier run's
            return f"<p>{html.escape(repr(self))}: its report is written when training ends</p>"
        page = html.escape(self.report.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="700" frameborder="0"></iframe>'

    @property
    def _records(self) -> Records | None:
        return self._writer.records

    @property
    def _output_folder(self) -> Path | None:
        """Where this process writes: the run folder, or the folder of bare records."""
        return self.folder or (None if self._records is None else self._records.folder)

    def _wrappers(self) -> dict[str, Callable[..., Any]]:
        """Return the wrapper of each wrapped trainer method, by the method's name."""
        return {"train": self.on_train, **self._steps.wrappers(), **self._checkpoints.wrappers()}

    @property
    def loss_settings(self) -> LossSettings:
        """The settings of the loss that training uses, interventions included."""
        return self._loss.settings

    def remove(self) -> None:
        """Remove the probes and everything else that was attached. The measurements are kept."""
        for batch in self._trainer._buffered_inputs or []:
            for key in batches.EXTRA_BATCH_KEYS:
                batch.pop(key, None)
        self.driver.close()
        self._undo_engine.close()
        self._undo.close()

    def __enter__(self) -> Attachment:
        self._ends_with_training = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None and not self._was_called and all_ranks().number == 0:
            logger.warning(announcements.NOTHING_TRAINED)
        self._end(error)
        if self.run is None:
            note_interrupt(error, self._records)

    def on_train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._end_run(None)  # of an earlier training in the same `with` block
        self._failed, self._was_called = "", True
        self._checkpoints.resumed = None  # of a training that ended between loading it and beginning
        self._guard.begin()
        try:
            with self._records_claim or contextlib.nullcontext():
                output = original(*args, **kwargs)
        except BaseException as error:
            self._failed = announcements.how_it_ended(self._trainer, error)
            if self._ends_with_training:
                self._end(error)
            raise
        if self._ends_with_training:
            self._end(None)
        return output

    def _end(self, error: BaseException | None) -> None:
        """Remove everything from the trainer, and write the report if the run has begun."""
        self.remove()
        self._end_run(error)

    def _end_run(self, error: BaseException | None) -> None:
        """Write what is left, then the report, and unlock the folder, even if the disk is full."""
        try:
            self._log.flush()
        finally:
            if self.run is not None and self.run.has_begun:
                self._write_report(self.run, error)

    def _write_report(self, run: AttachedRun, error: BaseException | None) -> None:
        """Write the report, and say where it is: in the log, and below the traceback of an error."""
        try:
            line = run.end(self._outcome(self._failed or announcements.how_it_ended(self._trainer, error)))
        finally:
            self._termination.release()
        self._has_report = True
        if line:
            line += announcements.how_to_resume(self._trainer) if self._failed else ""
            logger.warning(line)
            if error is not None:
                error.add_note(line)

    def _outcome(self, how: str) -> str:
        return f"{how}; {self._guard.reason}" if self._guard.reason else how

    def _write_before_the_end(self) -> None:
        """Write the report now, because SIGTERM arrived. Nothing is removed: training may go on."""
        assert self.run is not None
        self._log.flush()
        how = self._outcome(announcements.how_it_ended(self._trainer, "was told to end (SIGTERM)"))
        logger.warning(self.run.closing_line(how))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        would_restart = self._has_stepped and state.global_step == 0
        if self.run is None and would_restart and (self.probes or self._records is not None):
            raise UserError(
                "this trainer has trained before, so its records and running sums would restart midway: continue "
                "with train(resume_from_checkpoint=...), or remove() these probes and attach new ones"
            )
        self._undo_engine.close()  # left over if an exception ended the previous training in the middle of a step
        resumed, self._checkpoints.resumed = self._checkpoints.resumed, None
        attached_settings = {
            "whole_prompts": self._rollouts.whole_prompts,
            "interventions": [intervention.name for intervention in self._loss.interventions],
            "target_kl_share": self._bound and self._bound.share_of_entropy,
        }
        with announcements.hide_progress_bar():
            self._begin_run(resumed)
            settings: dict[str, Any] = {}
            with self._guard.watching(refuses=True):
                settings = settings_of_trainer(self._trainer, attached_settings)
                self._write_config(settings)
                if self.probes or self.driver.is_bounded:
                    self._begin_training(resumed)
            with self._guard.watching(refuses=True):
                if self._records is not None:
                    self._records.start(state.global_step, settings, has_failed=bool(self._guard.reason))
        self._log.begin()
        self._warnings.begin()

    def _begin_run(self, resumed: Resumed | None) -> None:
        """Choose the folder to write to, and lock it. Collective."""
        self._has_report = False
        run_id = "" if resumed is None else resumed.run_id  # a checkpoint without a run starts a new one
        if self.run is not None:
            self.run.begin(run_id)
            self._checkpoints.run_id = self.run.run_id
            if all_ranks().number == 0:
                self._writer.records = self.run.records()
                self._termination.listen()
        elif not self.is_cli:
            claim = self._records_claim
            self._checkpoints.run_id = on_main_process(lambda: "" if claim is None else claim.begin(run_id))

    def _write_config(self, settings: Mapping[str, Any]) -> None:
        if self.run is not None and all_ranks().number == 0:
            self.run.write_config({**settings, "probes": settings_of_probes(self.probes), "provenance": provenance()})

    def _begin_training(self, resumed: Resumed | None) -> None:
        """Start the driver. Only now are parameters and optimizer final: some launches shard them in `train()`."""
        trainer, whole_prompts = self._trainer, self._rollouts.whole_prompts
        self._rollouts.mark_leftover_rollout()
        loop = loop_of(trainer, self._policy, self.loss_settings, whole_prompts=whole_prompts, is_cli=self.is_cli)
        loop = dataclasses.replace(loop, opening=announcements.opening_line(self.probes, self._output_folder))
        self.driver.start(loop, None if resumed is None else resumed.states)
        if trainer.is_deepspeed_enabled:
            wrap(trainer.model_wrapped, "step", self._steps.on_engine_step, self._undo_engine)
        else:
            steps = loop.shard.optimizer.register_step_pre_hook(self._steps.about_to_step)
            self._undo_engine.callback(steps.remove)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._undo_engine.close()
        with self._guard.watching():
            self.driver.end()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guard.watching():
            self.driver.stepped()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_stepped, step = True, state.global_step
        numbers: dict[str, float] = self._guard.attempt(lambda: self._finish_step(step), otherwise={})
        with self._guard.watching():
            if self._guard.reason:
                self._writer.write_missing(step, self._guard.reason)
            self._log.add(step, numbers, will_log=control.should_log)

    def _finish_step(self, number: int) -> dict[str, float]:
        result = self.driver.finish()
        self._warnings.warn(number, result)
        self._writer.write(number, result)
        return result.numbers

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        with self._guard.watching():
            if "loss" in logs:
                self._log.write(state.global_step, logs)
            elif self._records is not None and "eval_loss" in logs:  # the summary at the end of training has neither
                self._records.write_evaluation(state.global_step, logs)
