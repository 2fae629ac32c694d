"""What is evaluated, and with which options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.evaluation.metrics import Metric
from rl_training.evaluation.options import EvaluationOptions
from rl_training.evaluation.responses import Batch, choose_rows, make_batches
from rl_training.records.evaluated import BUILT_IN_METRICS
from rl_training.tasks.task import Task

# Options that affect how a result is computed or stored, but not the result.
NOT_COMPARED = ("batch_size", "gzip", "overwrite")
TAKEN = {name.partition("/")[0] for name in BUILT_IN_METRICS}  # no metric of the user's own has one of these names


@dataclass(frozen=True)
class EvaluationSpec:
    """Which checkpoints are evaluated on which task, and how.

    Raises:
        UserError: A metric's name cannot be used, or the task has no evaluation split.
    """

    checkpoints: Mapping[int, Path]  # by step, in order
    task: Task
    metrics: Mapping[str, Metric]  # the user's own
    options: EvaluationOptions
    settings: Mapping[str, Any]  # must be equal too for results to share a table; contains no secrets

    def __post_init__(self) -> None:
        for metric in self.metrics:
            if metric in TAKEN:
                raise UserError(f"metrics.{metric}: there is a built-in metric {metric}; give yours another name")
        _ = self.rows  # refuses a task without an evaluation split

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The rows of the evaluation split whose prompts are answered."""
        return choose_rows(len(self.task.held_out), self.options.fraction, self.options.seed)

    @property
    def compared(self) -> dict[str, Any]:
        """All settings that must be equal for results to share a table."""
        options = dataclasses.asdict(self.options)
        return {key: value for key, value in options.items() if key not in NOT_COMPARED} | {**self.settings}

    def batches(self, share: int = 0, num_shares: int = 1) -> list[Batch]:
        """Return the batches of process number `share` out of `num_shares`."""
        options = self.options
        batches = make_batches(self.rows, options.responses_per_prompt, options.greedy, options.batch_size)
        return batches[share::num_shares]
