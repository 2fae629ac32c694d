"""What the trainer logs beside its own numbers, and the lines of metrics.jsonl, one for each step.

The trainer's log, and with it every dashboard, gets the core numbers of the probes, or all. The records have all, at
each step: where the trainer does not log a step (logging_steps), its line holds what TRL has noted of this step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from transformers.integrations import integration_utils
from trl import GRPOTrainer

from rl_training.engine.timing import SHARED
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.trl.compatibility import SECTIONS, wrap
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

    def on_send(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Let a dashboard have the probes' numbers in sections of their own, and not in that of the trainer's."""
        with ExitStack() as undo:
            wrap(integration_utils, SECTIONS, self._in_sections, undo)
            original(*args, **kwargs)

    def _in_sections(self, original: Callable[[dict], dict], logs: dict[str, Any]) -> dict[str, Any]:
        """Return logs under the names that a dashboard gets: a section is what stands before the first slash."""
        ours = {name: value for name, value in logs.items() if self._is_ours(name)}
        return ours | original({name: value for name, value in logs.items() if name not in ours})

    def _is_ours(self, name: str) -> bool:
        """Return whether a number of the log is one of the probes'."""
        latest = self._writer.latest
        return name in latest or name.removesuffix("_se") in latest or name.startswith("probe_cost/")

    def on_print(self, original: Callable[..., None], *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Print what the trainer logs, with only the core numbers of the probes."""
        core = self._core({name: 0.0 for name in logs if self._is_ours(name)})
        short = {name: value for name, value in logs.items() if name in core or not self._is_ours(name)}
        original(*args, logs=short, **kwargs)
