"""Writes a step's estimates to the records and the loop's log, and warns of those that are missing."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping

from torch import Tensor

from rl_training.engine.driver import StepDriver
from rl_training.hosts.sequences_of_step import sequences_of_step
from rl_training.mathematics.estimate import Estimate
from rl_training.records.jsonl import Records

logger = logging.getLogger(__name__)

NAMED = 3  # of the missing estimates, in a warning: the report has them all


class EstimateWriter:
    """Writes the estimates of each measured step.

    records  None on ranks that write none
    log      called with a name and a value, nan where the loop's log must not keep an older one
    speaks   whether this rank warns of missing estimates
    """

    def __init__(self, records: Records | None, log: Callable[[str, float], None], speaks: bool) -> None:
        self._records, self._log, self._speaks = records, log, speaks
        self.latest: dict[str, Estimate] = {}  # by name, of the last step that each was measured at
        self._times_missing: Counter[str] = Counter()  # by reason

    def finish(
        self, driver: StepDriver, number: int, world_size: int, decode: Callable[[Tensor], str], started: float
    ) -> dict[str, float]:
        """Ends the driver's step, writes its sequences and estimates, and returns what measuring them has cost.

        started  time.perf_counter() when the step began
        """
        step = driver.open_step
        if step is not None and self._records is not None and self._records.wants_rollouts_of(number):
            self._records.write_rollouts(number, sequences_of_step(step.rollouts, step.scores, decode))
        estimates = driver.finish()
        if not estimates:
            return {}
        self.write(number, world_size, estimates)
        return {f"probe_cost/{name}": cost for name, cost in driver.costs(time.perf_counter() - started).items()}

    def write(self, number: int, world_size: int, estimates: Mapping[str, Mapping[str, Estimate]]) -> None:
        """Takes the estimates of one step, by probe and name."""
        for probe, by_name in estimates.items():
            if self._records is not None:
                self._records.write_estimates(number, world_size, probe, by_name)
            self.latest.update(by_name)
            for name, estimate in by_name.items():
                self._log(name, estimate.value)
                self._log(f"{name}_se", estimate.stderr)
            self._warn_of_missing(by_name)

    def _warn_of_missing(self, estimates: Mapping[str, Estimate]) -> None:
        """Warns once of each reason why numbers are missing, from its second step on: at the first, some must be."""
        missing: dict[str, list[str]] = {}
        for name, estimate in estimates.items():
            if math.isnan(estimate.value):
                missing.setdefault(estimate.reason, []).append(name)
        for reason, names in missing.items():
            self._times_missing[reason] += 1
            if self._times_missing[reason] == 2 and self._speaks:
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                logger.warning(f"not measured: {', '.join(names[:NAMED])}{more}: {reason}")
