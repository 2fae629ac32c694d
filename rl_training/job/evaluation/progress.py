"""The progress bar of an evaluation: the responses that this process makes, and the finished checkpoints."""

from __future__ import annotations

import sys
from typing import NoReturn

from tqdm import tqdm


class EvaluationProgress:
    """A bar of the responses that this process makes, with the number of finished checkpoints. Use it in a `with`.

    Args:
        num_responses: How many responses this process makes.
        num_checkpoints: All checkpoints of the evaluation.
        num_finished: Those that were finished before.
        shown: Whether to show the bar, as one process does.
    """

    def __init__(self, num_responses: int, num_checkpoints: int, num_finished: int, shown: bool) -> None:
        self._num_checkpoints = num_checkpoints
        self._num_finished = num_finished
        every = 0.2 if sys.stderr.isatty() else 10.0  # seconds between two updates
        self._bar: tqdm[NoReturn] = tqdm(
            total=num_responses, unit="response", mininterval=every, maxinterval=every, disable=not shown
        )

    def __enter__(self) -> EvaluationProgress:
        self._show_finished()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.close()

    def add_responses(self, count: int) -> None:
        self._bar.update(count)

    def add_checkpoint(self) -> None:
        self._num_finished += 1
        self._show_finished()

    def _show_finished(self) -> None:
        self._bar.set_description(f"{self._num_finished} of {self._num_checkpoints} checkpoints")
