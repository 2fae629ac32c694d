"""Adds the probes' numbers to the trainer's log, and writes the lines of metrics.jsonl, one per step.

The trainer's log, and thus every dashboard, gets the core numbers of the probes, or all of them. The records get all of
them at every step. If the trainer does not log a step (logging_steps), its line has TRL's metrics of that step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils
from trl import GRPOTrainer

from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl.guard import Guard
from rl_training.hosts.trl.members import REWRITE_LOGS
from rl_training.hosts.trl.wrapping import wrap
from rl_training.records.core_metrics import CORE
from rl_training.vocabulary import ENGINE

NUM_CORE = 15  # most numbers that probes add to the log, unless all are requested


class TrainerLog:
    """Passes the numbers of each step to the trainer's log and to the records.

    Args:
        trainer: The trainer.
        writer: Has the records and the names of the estimates.
        guard: Knows the current training, and runs what chooses the numbers that are shown.
        shows_all: Whether the log gets all numbers, or only the core.
    """

    def __init__(self, trainer: GRPOTrainer, writer: EstimateWriter, guard: Guard, shows_all: bool) -> None:
        self._trainer = trainer
        self._writer = writer
        self._guard = guard
        self._shows_all = shows_all
        # TRL's list of each metric, and how many values it had when the last step ended.
        self._seen: dict[str, tuple[list[float], int]] = {}
        self._line: dict[str, Any] = {}  # line of the current step once it has ended, until it is written

    def begin(self) -> None:
        """Start afresh when training begins."""
        self._seen = {}
        self._line = {}

    def add(self, numbers: Mapping[str, float]) -> None:
        """Take the probes' numbers of the current step, which has ended: values by name, nan where missing.

        Its line waits for `flush`: whether the trainer logs the step, so that `write` completes the line, may be
        decided later, at the end of an epoch or by another callback.
        """
        self.flush()
        line = self._new_means() | {name: value for name, value in numbers.items() if not math.isnan(value)}
        metrics = self._trainer._metrics["train"]
        shown = numbers.keys() if self._shows_all else self._core_names(numbers)
        for name in shown:
            if not name.startswith("probe_cost/"):
                metrics.pop(name, None)  # TRL logs the mean of the list: keep only the latest value
            if not math.isnan(numbers[name]):
                metrics[name].append(numbers[name])
        self._seen = {name: (values, len(values)) for name, values in metrics.items()}
        self._line = line

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write the line of a step that the trainer logs."""
        if self._writer.records is None:
            return
        numbers = self._line if step == self._guard.training.step else {}
        self._line = {}
        self._writer.records.write_metrics(step, {**logs, **numbers})

    def write_evaluation(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write the numbers of an evaluation by the trainer."""
        if self._writer.records is not None:
            self._writer.records.write_evaluation(step, logs)

    def flush(self) -> None:
        """Write the line of the current step if it has ended and its line is not yet written."""
        line = self._line
        self._line = {}  # before it is written: a line that cannot be written is not tried again
        if line and self._writer.records is not None:
            self._writer.records.write_metrics(self._guard.training.step, line)

    def _new_means(self) -> dict[str, float]:
        """Return the means of the training metrics that TRL has collected since the last step ended."""
        means = {}
        for name, values in self._trainer._metrics["train"].items():
            seen, num_seen = self._seen.get(name, ([], 0))
            new = values[num_seen:] if values is seen else values  # another list: TRL logged, and dropped the old one
            known = [value for value in new if not math.isnan(value)]
            if known:
                means[name] = sum(known) / len(known)
        return means

    def _core_names(self, names: Iterable[str]) -> list[str]:
        """Return the core of these names: those in CORE, and the first of each probe that has none in it."""
        by_probe = [of_probe for probe, of_probe in self._writer.names.items() if probe != ENGINE]
        first = [name for of_probe in by_probe if not {*of_probe} & {*CORE} for name in of_probe[:1]]
        return [name for name in names if name in CORE or name in first][:NUM_CORE]

    def on_send(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Send the log to a dashboard, with the probes' numbers in sections of their own instead of the trainer's."""
        with ExitStack() as undo:
            wrap(integration_utils, REWRITE_LOGS, self._rename_logs, undo)
            return original(*args, **kwargs)

    def _rename_logs(self, original: Callable[[dict], dict], logs: dict[str, Any]) -> dict[str, Any]:
        """Rename logs as transformers does, except the probes' numbers: what stands before a slash is the section."""
        none: dict[str, Any] = {}
        of_probes = self._guard.attempt(lambda: self._of_probes(logs), otherwise=none)
        return of_probes | original({name: value for name, value in logs.items() if name not in of_probes})

    def on_print(self, original: Callable[..., Any], *args: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
        """Print the trainer's log with only the core numbers of the probes."""
        shown = self._guard.attempt(lambda: self._only_core(logs), otherwise=logs)
        return original(*args, logs=shown, **kwargs)

    def _only_core(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers in the log, without those of probes that are not in the core."""
        of_probes = self._of_probes(logs)
        core = self._core_names(of_probes)
        return {name: value for name, value in logs.items() if name in core or name not in of_probes}

    def _of_probes(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers in the log that come from probes."""
        latest = self._writer.latest
        return {
            name: value
            for name, value in logs.items()
            if name in latest or name.removesuffix("_se") in latest or name.startswith("probe_cost/")
        }


def is_dashboard(callback: TrainerCallback) -> bool:
    """Return whether this is a logging callback of transformers, which renames logs with the function REWRITE_LOGS."""
    return type(callback).__module__ == integration_utils.__name__ and hasattr(integration_utils, REWRITE_LOGS)
