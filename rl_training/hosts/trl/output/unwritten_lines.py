"""Counts the lines of the records that cannot be written, as on a full disk: they are left out, which ends nothing."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)


class UnwrittenLines:
    """The steps of a training of which the records lack lines. The user is told of the first."""

    def __init__(self) -> None:
        self._steps: set[int] = set()

    def add(self, step: int, path: Path, error: OSError) -> None:
        """Note that lines of a step could not be written to a file."""
        if not self._steps:
            logger.warning(
                f"step {step}: {path} cannot be written ({error.strerror}): the records lack lines until it can; "
                "measuring and training go on"
            )
        self._steps.add(step)

    def __str__(self) -> str:
        """Return what the records lack, in words. Empty if they lack nothing."""
        if not self._steps:
            return ""
        which = f"{len(self._steps)} steps, of which the first is" if len(self._steps) > 1 else "step"
        return f"the records lack lines of {which} {min(self._steps)}"
