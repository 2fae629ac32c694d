"""What probes answer at the end of a step: asked for, recorded, logged with what it cost, and missed with a word."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.live.context import Step
from rl_training.mathematics.estimate import Estimate
from rl_training.probes.base import Probe
from rl_training.records.jsonl import Records

logger = logging.get_logger(__name__)


class Answers:
    """Where the answers of a run go: to the records, if there are any on this rank, and to the trainer's log."""

    def __init__(self, trainer: GRPOTrainer, records: Records | None) -> None:
        self._trainer = trainer
        self._records = records
        self.latest: dict[str, Estimate] = {}  # by name, of the last step that each was measured at
        self._times_missing: Counter[str] = Counter()  # by reason

    def take(self, step: Step) -> None:
        """Asks every probe of a measured step, and passes on what it says. ValueError when that is nothing."""
        assert step.context is not None
        number = step.context.step
        for probe in step.probes:
            with step.timed(probe):
                estimates = probe.measure(step.context)
            if not isinstance(estimates, Mapping) or not all(isinstance(e, Estimate) for e in estimates.values()):
                raise ValueError(f"probe {probe.name!r}: measure must return Estimates by name, and gave {estimates!r}")
            if not estimates:
                raise ValueError(f"probe {probe.name!r} measured nothing at step {number}: answer nan instead")
            if self._records is not None:
                self._records.write_estimates(number, step.context.num_ranks, probe.name, estimates)
            self.latest.update(estimates)
            self._log(estimates)
            self._warn_of_missing(estimates)

    def log_costs(self, step: Step, probes: Iterable[Probe], step_seconds: float, driver_bytes: int) -> None:
        """Logs the seconds of each probe, as a share of the step too, and the bytes that all probes hold."""
        metrics = self._trainer._metrics["train"]
        num_bytes = sum(probe.num_buffer_bytes for probe in probes) + driver_bytes
        metrics["probe_cost/peak_bytes"].append(float(num_bytes))
        for name, seconds in step.seconds.items():
            metrics[f"probe_cost/{name}_seconds"].append(seconds)
        metrics["probe_cost/fraction_of_step"].append(sum(step.seconds.values()) / step_seconds)

    def _log(self, estimates: Mapping[str, Estimate]) -> None:
        metrics = self._trainer._metrics["train"]  # averaged over `logging_steps`: ours keep the latest step's value
        for name, estimate in estimates.items():
            for key, value in ((name, estimate.value), (f"{name}_se", estimate.stderr)):
                metrics.pop(key, None)
                if not math.isnan(value):
                    metrics[key].append(value)

    def _warn_of_missing(self, estimates: Mapping[str, Estimate]) -> None:
        """Says once why numbers are missing, when that reason holds at a second step: at a first step, some must be."""
        missing: dict[str, list[str]] = {}
        for name, estimate in estimates.items():
            if math.isnan(estimate.value):
                missing.setdefault(estimate.reason, []).append(name)
        for reason, names in missing.items():
            self._times_missing[reason] += 1
            if self._times_missing[reason] == 2 and self._trainer.accelerator.is_main_process:
                logger.warning(f"not measured: {', '.join(names)}: {reason}")
