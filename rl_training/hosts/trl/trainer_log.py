"""What the trainer logs beside its own numbers, and the lines of metrics.jsonl, one for each step.

The trainer's log, and with it every dashboard, gets the core numbers of the probes, or all. The records have all, at
each step: where the trainer does not log a step (logging_steps), its line holds what TRL has noted of this step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from trl import GRPOTrainer

from rl_training.engine.timing import SHARED
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.records.workspace import CORE

NUM_CORE = 15  # numbers that the probes add to the log at most, if not all are asked for


class TrainerLog:
    """Hands the numbers of each step to the trainer's log and to the records.

    shows_all  the log gets all numbers, not only the core
    """

    def __init__(self, trainer: GRPOTrainer, writer: EstimateWriter, shows_all: bool) -> None:
        self._trainer, self._writer, self._shows_all = trainer, writer, shows_all
        self.begin()

    def begin(self) -> None:
        """Forget what was noted: training begins."""
        self._num_noted: dict[str, int] = {}  # values of each metric that TRL had noted when the last step ended
        self._line: dict[str, Any] = {}  # of the step that has ended, until it is written
        self._step = 0

    def add(self, step: int, numbers: Mapping[str, float], will_log: bool) -> None:
        """Take the probes' numbers of a step that has ended.

        Args:
            will_log: The trainer is about to log this step: `write` completes its line.
        """
        self.flush()
        line = self._noted() | {name: value for name, value in numbers.items() if not math.isnan(value)}
        metrics = self._trainer._metrics["train"]
        shown = numbers.keys() if self._shows_all else self._core(numbers)
        for name in shown:
            if not name.startswith("probe_cost/"):
                metrics.pop(name, None)  # keeps the latest step's value: the log is the mean since the last one
            if not math.isnan(numbers[name]):
                metrics[name].append(numbers[name])
        self._num_noted = {name: len(values) for name, values in metrics.items()}
        self._line, self._step = line, step
        if not will_log:
            self.flush()

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write the line of a step that the trainer logs."""
        if self._writer.records is None:
            return
        numbers = self._line if step == self._step else {}
        self._line = {}
        self._writer.records.write_metrics(step, {**logs, **numbers})

    def flush(self) -> None:
        """Write the line of the last step, if it is not written yet."""
        line, self._line = self._line, {}
        if line and self._writer.records is not None:
            self._writer.records.write_metrics(self._step, line)

    def _noted(self) -> dict[str, float]:
        """Return the means of what TRL has noted of training since the last step ended."""
        means = {}
        for name, values in self._trainer._metrics["train"].items():
            before = self._num_noted.get(name, 0)
            new = values[before if before <= len(values) else 0 :]  # fewer: they were logged and cleared meanwhile
            known = [value for value in new if not math.isnan(value)]
            if known:
                means[name] = sum(known) / len(known)
        return means

    def _core(self, numbers: Mapping[str, float]) -> list[str]:
        """Return the core of these numbers: those of CORE, and the first one of each probe that has none there."""
        by_probe = [names for probe, names in self._writer.names.items() if probe != SHARED]
        first = [name for names in by_probe if not {*names} & {*CORE} for name in names[:1]]
        return [name for name in numbers if name in CORE or name in first][:NUM_CORE]

    def on_print(self, original: Callable[..., None], *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Print what the trainer logs, with only the core numbers of the probes."""
        ours = {key for name in self._writer.latest for key in (name, f"{name}_se")}
        hidden = ours - {*self._core(dict.fromkeys(ours, 0.0))}
        short = {k: v for k, v in logs.items() if k not in hidden and (k in CORE or not k.startswith("probe_cost/"))}
        original(*args, logs=short, **kwargs)
