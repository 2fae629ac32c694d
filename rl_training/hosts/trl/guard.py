"""Limits the damage of an error in measuring code: it ends the measuring, and training continues as if never measured.

All measuring code runs in a guard, and there are four ways in:

    around        a hook around a method of the trainer
    attempt       a callback's work, unless measuring has ended
    watching      work that goes on after measuring has ended, such as writing what is left
    after_error   work after training itself has failed, whose error stays the one that is raised

A UserError before the first step is raised all the same: it tells the user what to change.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from transformers.utils import logging

from rl_training.engine.driver import StepDriver
from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl.options import Options
from rl_training.hosts.trl.training import Training
from rl_training.parallel.ranks import all_ranks
from rl_training.records.failure import FAILURE_FILE, write_failure
from rl_training.records.files.masking import mask_line

logger = logging.get_logger(__name__)

Result = TypeVar("Result")
# Runs around one call of a method, with the call's arguments. It yields once: what stands before the yield runs before
# the method, and the yield returns what the method has returned, or raises its error. A hook that returns something
# else than None replaces the method's result by it.
Hook = Callable[..., Generator[None, Any, Any]]
STRICT = "RL_TRAINING_STRICT"  # environment variable: with 1, errors of probes end training by default
ENDS_TRAINING = "a probe has failed on this process, and the others cannot be told, so training ends"


class Guard:
    """Catches errors of the measuring code. Errors of the user's own code never reach it.

    Args:
        driver: Closed when measuring ends.
        writer: Its records get the traceback.
        options: The options of the attachment. With `strict`, or if training depends on measurements, errors end it;
            where `strict` is None, the environment variable STRICT decides.

    Attributes:
        training: The current training, for all that measure, log or save.
    """

    def __init__(self, driver: StepDriver, writer: EstimateWriter, options: Options) -> None:
        self._driver = driver
        self._writer = writer
        is_strict = os.environ.get(STRICT) == "1" if options.strict is None else options.strict
        self._raises = options.training_needs_measurements or is_strict
        self.training = Training()  # none yet

    def begin(self, training: Training) -> None:
        """Begin a training. It is measured even if an error ended the measuring of an earlier one."""
        self.training = training

    @property
    def reason(self) -> str:
        """Why measuring ended before training did, in words. Empty while it has not."""
        return self.training.measuring_ended

    def around(self, hook: Hook, *, always: bool = False) -> Callable[..., Any]:
        """Return the wrapper of a method, for `wrap`, that runs a hook around each call.

        The method itself runs outside the guard. Its errors are raised unchanged, even if the hook fails too.

        Args:
            hook: The hook, which gets the arguments of each call.
            always: Whether to run the hook even if measuring has ended.
        """

        def wrapper(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            observed = None
            if always or not self.reason:
                with self.watching():
                    observed = _begin(hook(*args, **kwargs))
            try:
                result = method(*args, **kwargs)
            except BaseException as error:
                if observed is not None:
                    with self.after_error(error):
                        observed.throw(error)
                raise
            if observed is not None:
                with self.watching():
                    if self.reason and not always:  # measuring has ended within the method
                        observed.close()
                    else:
                        result = _finish(observed, result)
            return result

        return wrapper

    def attempt(self, measure: Callable[[], Result], otherwise: Result = None) -> Result:  # type: ignore[assignment]
        """Run measuring code unless measuring has ended, and return its result. An error in it ends the measuring.

        Args:
            measure: The measuring code.
            otherwise: What to return if measuring has ended, before or now.
        """
        if not self.reason:
            with self.watching():
                return measure()
        return otherwise

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Run measuring code even if measuring has ended. An error ends the measuring, or training if it must."""
        try:
            yield
        except Exception as error:
            if self._raises or (isinstance(error, UserError) and not self.training.step):
                raise
            if all_ranks().count > 1:
                error.add_note(ENDS_TRAINING)
                raise
            self._end(error)

    @contextlib.contextmanager
    def after_error(self, error: BaseException) -> Iterator[None]:
        """Run measuring code after training has failed. If it fails too, the error of training gets a note of that.

        Args:
            error: The error of training, which the caller raises.
        """
        try:
            yield
        except BaseException as second:
            if second is error or isinstance(second, StopIteration):  # a hook has passed it on, or has caught it
                return
            if isinstance(error, StopIteration) and second.__cause__ is error:  # passed on, as Python renames it
                return
            if not isinstance(second, Exception):  # Ctrl-C
                raise
            error.add_note(mask_line(f"measuring failed after this error ({_described(second)})"))

    def _end(self, error: Exception) -> None:
        """End the measuring because of an error, with a warning. Of later errors only the first gets a warning."""
        training = self.training
        if self.reason:
            if not training.has_warned_again:
                logger.warning(
                    mask_line(f"step {training.step}: another error after measuring ended ({_described(error)})")
                )
            training.has_warned_again = True
            return
        when = f"at step {training.step}" if training.step else "before its first step"
        training.measuring_ended = mask_line(
            f"measuring ended {when} by an error ({_described(error)}), and training went on without it"
        )
        training.early_error = None if training.step else error
        where = "strict=True raises it"
        if self._writer.records is not None:
            with contextlib.suppress(Exception):  # the disk may be full
                write_failure(self._writer.records.folder, self.reason, error)
                where = f"its traceback is in {self._writer.records.folder / FAILURE_FILE}"
        logger.warning(f"{self.reason}: {where}")
        with self.watching():  # closing may fail too
            self._driver.close()

    def write_early_error(self) -> None:
        """Write the error that has ended measuring before there were records, as when a checkpoint is loaded."""
        error = self.training.early_error
        if error is not None and self._writer.records is not None:
            write_failure(self._writer.records.folder, self.reason, error)
        self.training.early_error = None


def _begin(observed: Generator[None, Any, Any]) -> Generator[None, Any, Any]:
    """Run what a hook does before its method, and return the hook."""
    next(observed)
    return observed


def _finish(observed: Generator[None, Any, Any], result: Any) -> Any:
    """Run what a hook does after its method. Return what replaces the method's result, or that itself."""
    try:
        observed.send(result)
    except StopIteration as ended:
        return result if ended.value is None else ended.value
    raise AssertionError("a hook yields once")


def _described(error: Exception) -> str:
    """Return on one line: the probe in which an error was raised, the error's type and its message."""
    source = " ".join(filter(None, (_failing_probe(error), type(error).__name__)))
    return f"{source}: {' '.join(str(error).split())}"


def _failing_probe(error: Exception) -> str:
    """Return the probe in whose method an error was raised, as "probe NAME,". Empty if it was raised elsewhere."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    probes = [frame.f_locals.get("self") for frame in frames]
    return next((f"probe {probe.name}," for probe in reversed(probes) if isinstance(probe, Probe)), "")
