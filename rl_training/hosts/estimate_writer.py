"""Takes what each step leaves when it ends: writes its estimates and sequences to the records, and warns of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_training.engine.driver import StepDriver
from rl_training.engine.step_result import StepResult
from rl_training.errors import UserError
from rl_training.hosts.sequence_rows import sequence_rows
from rl_training.hosts.step_averages import step_averages
from rl_training.hosts.step_warnings import StepWarnings
from rl_training.parallel.ranks import all_ranks
from rl_training.records.writer import Records
from rl_training.statistics.estimate import Estimate


class EstimateWriter:
    """Writes the results of each step to the records, on rank 0, and holds the latest estimates, on every rank.

    Args:
        driver: Runs the probes.
        records: Where to write. None writes nothing.
        decode: Returns the text of a tensor of token ids.
        longer_responses: Advice: what lets responses get longer in this loop.
    """

    def __init__(
        self,
        driver: StepDriver,
        records: Records | None,
        decode: Callable[[Tensor], str],
        longer_responses: str = "allow longer ones",
    ) -> None:
        self._driver, self._decode = driver, decode
        self.probes = driver.probes
        self._warnings = StepWarnings(longer_responses)
        self.records = records if all_ranks().number == 0 else None
        self.latest: dict[str, Estimate] = {}  # by name, each from the last step that measured it
        self.names: dict[str, list[str]] = {}  # names of the estimates, by probe

    def wants_rollouts_of(self, number: int) -> bool:
        """Return whether the sequences of a step are recorded, by its number, even if no probe measures it."""
        return self.records is not None and self.records.wants_rollouts_of(number)

    def begin_training(self, records: Records | None) -> None:
        """Begin a training, which is warned of everything once.

        Args:
            records: Where this rank writes it. None writes nothing.
        """
        self._warnings.begin()
        self.records = records

    def finish(self, number: int) -> StepResult:
        """End the driver's step, warn of it, write it, and return what it leaves. Collective if a probe measured it.

        Args:
            number: The optimizer step.
        """
        result = self._driver.finish()
        self._warnings.warn(number, result)
        self._write(number, result)
        return result

    def _write(self, number: int, result: StepResult) -> None:
        if result.rollouts and self.records is not None and self.records.wants_rollouts_of(number):
            self.records.write_rollouts(number, sequence_rows(result, self._decode))
        for probe, by_name in result.estimates.items():
            self.names[probe] = [*by_name]
            self._write_estimates(number, probe, by_name)

    def write_line(self, number: int, known: Mapping[str, Any], result: StepResult) -> dict[str, Any]:
        """Write the line of metrics.jsonl, for a loop that logs nothing itself. Collective.

        Args:
            number: The optimizer step.
            known: What the loop knows about it.
            result: What it has left.

        Returns:
            The line: averages over the responses and what was measured, as far as it is a number, and what the loop
            knows, which replaces averages of the same names.

        Raises:
            UserError: If a number that the loop knows has the name of one that was measured.
        """
        measured = result.numbers
        numbers = {"step_time": result.seconds, **step_averages(result), **measured}
        for name in known:
            if name in measured:
                raise UserError(f"metrics[{name!r}] has the name of a probe's number: give the loop's own another name")
        line = {**{name: value for name, value in numbers.items() if not math.isnan(value)}, **known}
        if self.records is not None:
            self.records.write_metrics(number, line)
        return line

    def write_missing(self, number: int, reason: str) -> None:
        """Write nan with this reason for every estimate of a step that is not measured because measuring has ended."""
        missing = Estimate.missing(reason)
        for probe in self.probes:
            if probe.measures_at(number):
                names = self.names.get(probe.name) or [probe.name]
                self._write_estimates(number, probe.name, dict.fromkeys(names, missing))

    def _write_estimates(self, number: int, probe: str, by_name: Mapping[str, Estimate]) -> None:
        self.latest.update(by_name)
        if self.records is not None:
            self.records.write_estimates(number, all_ranks().count, probe, by_name)


def as_records(given: Any) -> Records | None:
    """Return the given records, or new ones in the given folder. Raise UserError for anything else."""
    if given is None or isinstance(given, Records):
        return given
    if isinstance(given, str | Path):
        return Records(given)
    raise UserError(f"records={given!r}: give a folder, such as 'my_run/logs', or Records(FOLDER)")
