"""What a probe may cost: an error of ours ends the measuring, and training goes on as if nobody had measured it."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

from transformers.utils import logging

from rl_training.engine.driver import StepDriver
from rl_training.engine.probe import Probe
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.parallel.ranks import all_ranks
from rl_training.records.failure import FAILURE_FILE, write_failure
from rl_training.records.files.masking import mask_line

logger = logging.get_logger(__name__)

STRICT = "RL_TRAINING_STRICT"  # in the environment: errors of probes end training, where `attach` is not told
NOT_ALONE = "a probe has failed on this process, and the others cannot be told, so training ends"


class Guard:
    """Catches the errors of what measures. The user's own never pass through it.

    trains  what is measured also changes the training: nothing can be left out of it
    strict  errors end training
    """

    def __init__(self, driver: StepDriver, writer: EstimateWriter, *, trains: bool, strict: bool | None) -> None:
        self._driver, self._writer = driver, writer
        self._raises = trains or (os.environ.get(STRICT) == "1" if strict is None else strict)
        self.begin()

    def begin(self) -> None:
        """Begin a training: an error in one before it has ended measuring there alone."""
        self.step = 0  # that training is in
        self.reason = ""  # why measuring has ended before training

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context of our own calculations, whose error ends the measuring, or training where it must."""
        try:
            yield
        except Exception as error:
            if self._raises:
                raise
            if all_ranks().count > 1:
                error.add_note(NOT_ALONE)
                raise
            self._end(error)

    def _end(self, error: Exception) -> None:
        if self.reason:  # not even that can be written
            self._writer.records = None
            return
        whose = " ".join(filter(None, (_probe_in(error), type(error).__name__)))
        said = " ".join(str(error).split())
        self.reason = mask_line(
            f"measuring ended at step {self.step} by an error ({whose}: {said}), and training went on without it"
        )
        self._driver.close()
        where = "strict=True raises it"
        if self._writer.records is not None:
            with contextlib.suppress(Exception):  # it may be the disk that is full
                write_failure(self._writer.records.folder, self.reason, error)
                where = f"its traceback is in {self._writer.records.folder / FAILURE_FILE}"
        logger.warning(f"{self.reason}: {where}")


def _probe_in(error: Exception) -> str:
    """Return the name of the probe in whose method an error was raised, "" where it was in none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    probes = [frame.f_locals.get("self") for frame in frames]
    return next((f"probe {probe.name}," for probe in reversed(probes) if isinstance(probe, Probe)), "")
