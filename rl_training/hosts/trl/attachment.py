"""Attaches probes to a trl.GRPOTrainer, and removes them.

An attachment may see several trainings. Its objects, and who ends them:

    Attachment         the user's handle. Made by `attach` or by a DrGRPOTrainer. It makes the others and wraps the
                       trainer's methods with their hooks, and `remove` takes all of it off again
    TrainingCallback   begins each training of the trainer when `train()` is called, and ends it when `train()`
                       returns or raises; in a `with` block when that ends, or when `train()` is called again
    Training           one training, until the next one: its step, what it resumes, why its measuring ended, and its end
    StepDriver         runs the probes. StepHooks starts it with each training, and `remove` closes it
    Destination        where trainings write. Its folder is chosen and locked with each training, until it has ended
    MeasuredTrainer    the trainer as probes see it: its policy, its rollouts, its loss
    Guard              has the current Training, also for TrainerLog and CheckpointHooks; like EstimateWriter, they
                       stay for all trainings

Whatever of them fails, the trainer trains on and gets its methods back: see guard.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.engine.driver import StepDriver
from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl import announcements
from rl_training.hosts.trl.alerts import Alerts
from rl_training.hosts.trl.compatibility import check_version
from rl_training.hosts.trl.guard import Guard
from rl_training.hosts.trl.hooks.checkpoint import CheckpointHooks
from rl_training.hosts.trl.hooks.loss import LossHook
from rl_training.hosts.trl.hooks.rollout import RolloutHooks
from rl_training.hosts.trl.hooks.training_step import StepHooks
from rl_training.hosts.trl.measured_trainer import MeasuredTrainer
from rl_training.hosts.trl.options import Options
from rl_training.hosts.trl.output.destination import Destination
from rl_training.hosts.trl.refusals import refuse_a_running_training, refuse_what_cannot_be_measured
from rl_training.hosts.trl.reward_functions import named_rewards
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.settings.rollout_shape import sequences_per_step
from rl_training.hosts.trl.settings.whole_prompts import (
    prepare_whole_prompts,
    refuse_split_prompts,
    whole_prompts_only_reorder,
)
from rl_training.hosts.trl.trainer_log import TrainerLog, is_dashboard
from rl_training.hosts.trl.training_callback import TrainingCallback
from rl_training.hosts.trl.wrapping import wrap
from rl_training.parallel.ranks import all_ranks
from rl_training.records.folder import PAGE_FILE, REPORT_FOLDER
from rl_training.statistics.estimate import Estimate
from rl_training.step.batch import LossSettings

logger = logging.get_logger(__name__)


class Attachment(contextlib.AbstractContextManager["Attachment"]):
    """Probes attached to a trainer, until `remove`. Made by `attach`."""

    def __init__(
        self, trainer: GRPOTrainer, probes: Sequence[Probe], destination: Destination, options: Options
    ) -> None:
        options = _checked(trainer, probes, options)
        self._trainer = trainer
        self._destination = destination
        self._options = options
        self.driver = _make_driver(trainer, probes, options)
        self.probes = self.driver.probes
        self._measured = measured = MeasuredTrainer.of(trainer, options)
        decode = measured.policy.decode
        self._writer = writer = EstimateWriter(self.driver, destination.records, decode, options.longer_responses)
        self._guard = guard = Guard(self.driver, writer, options)
        self._log = TrainerLog(trainer, writer, guard, shows_all=options.metrics == "all")
        self._step_hooks = StepHooks(measured, self.driver, guard)
        self._callback = TrainingCallback(measured, self._step_hooks, guard, writer, self._log, destination)
        self._alerts = Alerts(destination) if options.alerts else None
        self._ends_with_training = not options.keep_attached  # False in a `with` block, whose end removes the probes
        self._is_removed = False
        self._undo = self._install()

    def _wrappers(self) -> dict[str, Callable[..., Any]]:
        """Return the wrapper of each wrapped method of the trainer, by the method's name.

        They pass on every argument: a subclass may have parameters that TRL's method lacks.
        """
        hooks = {
            **RolloutHooks(self._measured, self.driver).hooks(),
            **LossHook(self._measured, self.driver, self._guard, self._writer).hooks(),
            **self._step_hooks.hooks(),
        }
        of_checkpoints = CheckpointHooks(self._trainer, self.driver, self._guard).hooks()
        wrappers = {name: self._guard.around(hook) for name, hook in hooks.items()}
        wrappers |= {name: self._guard.around(hook, always=True) for name, hook in of_checkpoints.items()}
        wrappers["train"] = self.on_train
        if self._options.whole_prompts:
            wrappers["_prepare_inputs"] = prepare_whole_prompts
        return wrappers

    def _install(self) -> contextlib.ExitStack:
        """Wrap the methods of the trainer that probes need to see, until the returned stack is closed."""
        trainer = self._trainer
        with contextlib.ExitStack() as undo:
            for name, method in self._wrappers().items():
                wrap(trainer, name, method, undo)
            wrap(trainer, "_calculate_rewards", self._calculate_named_rewards, undo)
            for callback in trainer.callback_handler.callbacks if self.probes else ():
                if isinstance(callback, PrinterCallback | ProgressCallback):
                    wrap(callback, "on_log", self._log.on_print, undo)
                elif is_dashboard(callback):
                    wrap(callback, "on_log", self._log.on_send, undo)
            for added in filter(None, (self._callback, self._alerts)):
                trainer.add_callback(added)
                undo.callback(trainer.remove_callback, added)
            return undo.pop_all()

    def _calculate_named_rewards(self, calculate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the trainer's `_calculate_rewards`, in which errors of reward functions name them."""
        with named_rewards(self._trainer):
            return calculate(*args, **kwargs)

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
        return self._measured.loss.settings

    def _repr_html_(self) -> str:
        """Return the report for display in a notebook, in a self-contained frame."""
        # Without a report of the latest training, a page may be an earlier one's.
        if not self._destination.has_report or self.report is None or not self.report.is_file():
            return f"<p>{html.escape(repr(self))}: its report is written when training ends</p>"
        page = html.escape(self.report.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="700" frameborder="0"></iframe>'

    # --- its life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Attachment:
        if self._is_removed:
            raise UserError("these probes have been removed from their trainer: attach(trainer, ...) anew")
        self._ends_with_training = False
        return self

    def on_train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the trainer's `train`, measured. Without a `with` block, what is attached ends with it."""
        try:
            with self._callback.running():
                output = train(*args, **kwargs)
        except BaseException as error:
            if self._ends_with_training:
                with self._guard.after_error(error):
                    self._end(error)
            raise
        if self._ends_with_training:
            with self._guard.watching():
                self._end(None)
        return output

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with self._guard.after_error(error):
                self._end(error)
            with self._guard.after_error(error):
                self._destination.note_interrupt(error)
            return
        if not self._callback.has_run and all_ranks().number == 0:
            logger.warning(announcements.NOTHING_TRAINED)
        with self._guard.watching():
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Take everything off a trainer that is not to keep it, and write the report if training has begun."""
        try:
            if not self._options.keep_attached:
                self._uninstall()
        finally:
            self._callback.end(error)

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
        with self._guard.watching():
            self._uninstall()

    def _uninstall(self) -> None:
        """Take everything off the trainer, once. It gets its own methods back even if the rest fails."""
        if self._is_removed:
            return
        self._is_removed = True
        for batch in self._trainer._buffered_inputs or []:
            for key in batches.EXTRA_BATCH_KEYS:
                batch.pop(key, None)
        with self._undo:
            try:
                self.driver.close()
            finally:
                self._step_hooks.end()


def is_attached(trainer: Any) -> bool:
    """Return whether a trainer already has probes attached."""
    return _options_of_attached(trainer) is not None


def _options_of_attached(trainer: Any) -> Options | None:
    """Return the options of what is attached to a trainer. None if nothing is."""
    callbacks = trainer.callback_handler.callbacks
    return next((added.options for added in callbacks if isinstance(added, TrainingCallback)), None)


def _refuse_another(trainer: GRPOTrainer) -> None:
    """Raise UserError, with what to do, if a trainer already has probes attached."""
    options = _options_of_attached(trainer)
    if options is None:
        return
    if not options.keep_attached:
        raise UserError("this trainer already has probes attached: remove() those first, or pass all in one list")
    name = type(trainer).__name__
    why = f"{name} measures by itself: give probes=[...] and records='FOLDER/logs' to {name}(...)"
    if not options.training_needs_measurements:
        why += ", or call trainer.attachment.remove() before attach(trainer, FOLDER), which also writes a report"
    raise UserError(why)


def _checked(trainer: GRPOTrainer, probes: Sequence[Probe], options: Options) -> Options:
    """Return the options, with `whole_prompts` decided. UserError if probes cannot be attached to this trainer."""
    check_version(trainer)
    refuse_a_running_training(trainer)
    _refuse_another(trainer)
    if options.whole_prompts is None:
        options = dataclasses.replace(options, whole_prompts=whole_prompts_only_reorder(trainer))
    if options.whole_prompts:
        refuse_split_prompts(trainer)
    if probes or options.target_kl_share is not None:
        refuse_what_cannot_be_measured(trainer)
    return options


def _make_driver(trainer: GRPOTrainer, probes: Sequence[Probe], options: Options) -> StepDriver:
    """Return the driver of the probes. UserError if they exclude each other, or a step cannot have their folds."""
    driver = StepDriver(probes, options.target_kl_share)
    driver.refuse_impossible_folds(sequences_per_step(trainer.args), trainer.num_generations, all_ranks().count)
    return driver
