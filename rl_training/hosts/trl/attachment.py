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
from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl import announcements
from rl_training.hosts.trl.checkpoint_hooks import CheckpointHooks
from rl_training.hosts.trl.compatibility import check_version
from rl_training.hosts.trl.guard import Guard
from rl_training.hosts.trl.options import Options
from rl_training.hosts.trl.output.attached_training import AttachedTraining
from rl_training.hosts.trl.output.destination import Destination
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.refusals import refuse_what_cannot_be_measured
from rl_training.hosts.trl.reward_functions import named_rewards
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.settings.recorded import settings_of_trainer
from rl_training.hosts.trl.settings.rollout_shape import sequences_per_step
from rl_training.hosts.trl.settings.whole_prompts import refuse_split_prompts, whole_prompts_only_reorder
from rl_training.hosts.trl.step_hooks import make_step_hooks
from rl_training.hosts.trl.trainer_log import TrainerLog, is_dashboard
from rl_training.hosts.trl.wrapping import wrap
from rl_training.parallel.ranks import all_ranks
from rl_training.records.folder import PAGE_FILE, REPORT_FOLDER
from rl_training.statistics.estimate import Estimate
from rl_training.step.batch import LossSettings

logger = logging.get_logger(__name__)


class Attachment(TrainerCallback, contextlib.AbstractContextManager["Attachment"]):
    """Probes attached to a trainer, until `remove`. Made by `attach`."""

    def __init__(
        self, trainer: GRPOTrainer, probes: Sequence[Probe], destination: Destination, options: Options
    ) -> None:
        options = _checked(trainer, probes, options)
        self._trainer, self._destination, self._options = trainer, destination, options
        self.driver = _make_driver(trainer, probes, options)
        self.probes = self.driver.probes
        policy = TrainerPolicy(trainer)
        self._writer = EstimateWriter(self.probes, destination.records, policy.decode, options.longer_responses)
        self._guard = Guard(
            self.driver,
            self._writer,
            training_needs_measurements=options.training_needs_measurements,
            strict=options.strict,
        )
        self._steps = make_step_hooks(trainer, self.driver, policy, self._guard, self._writer, options)
        self._checkpoints = CheckpointHooks(trainer, self.driver, self._guard)
        self._log = TrainerLog(trainer, self._writer, shows_all=options.metrics == "all")
        self._has_stepped = False  # whether a step has been taken
        self._ends_with_training = not options.keep_attached  # False in a `with` block, whose end removes the probes
        self._training = self._next_training()
        self._is_removed = False
        self._undo = self._install()

    def _next_training(self) -> AttachedTraining:
        """Return what the next training writes."""
        return AttachedTraining(self._trainer, self._destination, self._writer, self._log, self._guard)

    def _install(self) -> contextlib.ExitStack:
        """Wrap the methods of the trainer that probes need to see, until the returned stack is closed."""
        trainer = self._trainer
        wrappers = {"train": self.on_train, **self._steps.wrappers(), **self._checkpoints.wrappers()}
        with contextlib.ExitStack() as undo:
            for name, method in wrappers.items():
                wrap(trainer, name, method, undo)
            undo.callback(setattr, trainer, "reward_funcs", trainer.reward_funcs)
            trainer.reward_funcs = named_rewards(trainer)
            for callback in trainer.callback_handler.callbacks if self.probes else ():
                if isinstance(callback, PrinterCallback | ProgressCallback):
                    wrap(callback, "on_log", self._log.on_print, undo)
                elif is_dashboard(callback):
                    wrap(callback, "on_log", self._log.on_send, undo)
            for added in filter(None, (self, self._options.callback)):
                trainer.add_callback(added)
                undo.callback(trainer.remove_callback, added)
            return undo.pop_all()

    # --- what it shows ------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> Mapping[str, Estimate]:
        """The latest estimates by name. They are the same on every rank if the probe says so."""
        return self._writer.latest

    @property
    def folder(self) -> Path | None:
        """The run folder: the one asked for, and once training has begun the one written to. None without a folder."""
        return self._destination.folder

    @property
    def report(self) -> Path | None:
        """The report's page, which exists once training has ended. None without a folder."""
        return None if self.folder is None else self.folder / REPORT_FOLDER / PAGE_FILE

    @property
    def loss_settings(self) -> LossSettings:
        """The settings of the loss that training uses, interventions included."""
        return self._steps.loss_settings

    @property
    def why_not_another(self) -> str:
        """Why nothing else can be attached to the trainer meanwhile, and what to do."""
        if not self._options.keep_attached:
            return "this trainer already has probes attached: remove() those first, or pass all in one list"
        name = type(self._trainer).__name__
        why = f"{name} measures by itself: give probes=[...] and records=FOLDER to {name}(...)"
        if self._options.training_needs_measurements:
            return why
        return f"{why}, or call trainer.attachment.remove() before attach(trainer, FOLDER), which also writes a report"

    def _repr_html_(self) -> str:
        """Return the report for display in a notebook, in a self-contained frame."""
        # Without a report of the latest training, a page may be an earlier one's.
        if not self._destination.has_report or self.report is None or not self.report.is_file():
            return f"<p>{html.escape(repr(self))}: its report is written when training ends</p>"
        page = html.escape(self.report.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="700" frameborder="0"></iframe>'

    # --- around a training --------------------------------------------------------------------------------------------

    def __enter__(self) -> Attachment:
        if self._is_removed:
            raise UserError("these probes have been removed from their trainer: attach(trainer, ...) anew")
        self._ends_with_training = False
        return self

    def on_train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._training.finish(None)  # an earlier one in the same `with` block
        self._training = self._next_training()
        self._checkpoints.take_resumed()  # of a training that ended between loading it and beginning
        try:
            with self._training.running():
                output = original(*args, **kwargs)
        except BaseException as error:
            self.driver.fail_step()  # at once: the trainer may train again with this optimizer, before `with` ends
            if self._ends_with_training:
                self._end(error)
            raise
        if self._ends_with_training:
            self._end(None)
        return output

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None and not self._training.has_run and all_ranks().number == 0:
            logger.warning(announcements.NOTHING_TRAINED)
        self._end(error)
        self._destination.note_interrupt(error)

    # --- begin --------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._refuse_restart(state)
        self._steps.reset()
        resumed = self._checkpoints.take_resumed()
        with announcements.hide_progress_bar():
            self._checkpoints.run_id = self._training.begin(resumed.run_id)
            settings: dict[str, Any] = {}
            with self._guard.watching(refuses=True):
                settings = settings_of_trainer(self._trainer, self._options.recorded)
                self._destination.write_config(settings, self.probes)
                if self.driver.is_needed:  # records alone suit trainers whose shards probes cannot read
                    opening = announcements.opening_line(self.probes, self._destination.output)
                    self._steps.begin(opening, resumed.states)
            self._training.begin_records(state.global_step, settings)
        self._log.begin()

    def _refuse_restart(self, state: Any) -> None:
        """Raise UserError if a second training would go on with the records and running sums of the first."""
        would_restart = self._has_stepped and state.global_step == 0 and not self._destination.has_own_folders
        if would_restart and (self.probes or self._destination.records is not None):
            anew = "make a new trainer" if self._options.keep_attached else "remove() these probes and attach new ones"
            raise UserError(
                "this trainer has trained before, so its records and running sums would restart midway: continue "
                f"with train(resume_from_checkpoint=...), or {anew}"
            )

    # --- a step, as the trainer's callbacks report it -----------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guard.watching():
            self._log.flush()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guard.watching():
            self.driver.stepped()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_stepped, step = True, state.global_step
        numbers: dict[str, float] = self._guard.attempt(lambda: self._steps.finish(step), otherwise={})
        with self._guard.watching():
            if self._guard.reason:
                self._writer.write_missing(step, self._guard.reason)
            self._log.add(step, numbers)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        with self._guard.watching():
            if "loss" in logs:
                self._log.write(state.global_step, logs)
            elif "eval_loss" in logs:  # the summary at the end of training has neither
                self._log.write_evaluation(state.global_step, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.end()
        with self._guard.watching():
            self._log.flush()
        with self._guard.watching():
            self.driver.end()

    # --- end ----------------------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        """Remove everything from a trainer that is not to keep it, and write the report if training has begun."""
        if not self._options.keep_attached:
            self._uninstall()
        self._training.finish(error)

    def remove(self) -> None:
        """Remove the probes and everything else that was attached. The measurements are kept.

        Raises:
            UserError: If the trainer was made with interventions or `target_kl_share`, which would be removed too.
        """
        if self._options.keep_attached and self._options.training_needs_measurements:
            raise UserError(
                "this trainer trains with interventions or target_kl_share, which would be removed with its probes: "
                "make a trainer without them"
            )
        self._uninstall()

    def _uninstall(self) -> None:
        self._is_removed = True
        for batch in self._trainer._buffered_inputs or []:
            for key in batches.EXTRA_BATCH_KEYS:
                batch.pop(key, None)
        with self._undo:  # the trainer gets its own methods back even if this fails
            self.driver.close()
            self._steps.end()


def is_attached(trainer: Any) -> bool:
    """Return whether a trainer already has probes attached."""
    return _attachment_of(trainer) is not None


def _attachment_of(trainer: Any) -> Attachment | None:
    """Return what is attached to a trainer."""
    return next((added for added in trainer.callback_handler.callbacks if isinstance(added, Attachment)), None)


def _checked(trainer: GRPOTrainer, probes: Sequence[Probe], options: Options) -> Options:
    """Return the options, with `whole_prompts` decided. UserError if probes cannot be attached to this trainer."""
    check_version(trainer)
    attached = _attachment_of(trainer)
    if attached is not None:
        raise UserError(attached.why_not_another)
    if options.whole_prompts is None:
        options = dataclasses.replace(options, whole_prompts=whole_prompts_only_reorder(trainer))
    if options.whole_prompts:
        refuse_split_prompts(trainer)
    if probes or options.target_kl_share is not None:
        refuse_what_cannot_be_measured(trainer)
    return options


def _make_driver(trainer: GRPOTrainer, probes: Sequence[Probe], options: Options) -> StepDriver:
    """Return the driver of the probes. UserError if they exclude each other, or a step cannot have their folds."""
    driver = StepDriver(probes, options.kl_bound())
    driver.refuse_impossible_folds(sequences_per_step(trainer.args), trainer.num_generations, all_ranks().count)
    return driver
