"""A run: its records as one table, and what is asked of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pandas as pd

from rl_training.records.evaluated import IN_TRAINING
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.folder import EVALUATIONS, checkpoints_of, step_of
from rl_training.records.jsonl import EVALUATIONS_FILE, METRICS_FILE, PROBES_FILE
from rl_training.records.table.config_file import settings_of_run
from rl_training.records.table.estimates import last_of, to_estimates
from rl_training.statistics.estimate import Estimate

Result = TypeVar("Result")


class Source(NamedTuple):
    """Where numbers come from: a file of logs/, or an evaluation of checkpoints."""

    file: str = ""
    evaluation: str = ""

    @property
    def title(self) -> str:
        """The name of an evaluation, the trainer's own or one of checkpoints."""
        if self == TRAINERS_EVALUATION:
            return IN_TRAINING
        return f"{EVALUATIONS}/{self.evaluation}" if self.evaluation == IN_TRAINING else self.evaluation


LARGEST = 1e150  # a value from here on counts as infinite, since sums of squares would be
LOGGED = Source(METRICS_FILE)
MEASURED = Source(PROBES_FILE)
TRAINERS_EVALUATION = Source(EVALUATIONS_FILE)


@dataclass(frozen=True)
class Run:
    """The records of a run, read once."""

    folder: Path
    steps: list[int]  # logged steps
    table: pd.DataFrame  # with the columns of reading.RUN_COLUMNS
    config: str | None  # text of config.yaml, secrets masked; None if there is none
    top_tokens: pd.DataFrame = field(default_factory=pd.DataFrame)  # rows of top_token/…, with their details

    @property
    def name(self) -> str:
        return str(escape_surrogates(self.folder.resolve().name))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recorded settings, secrets masked; {} if there are none. Raises UserError if they cannot be read."""
        return settings_of_run(self.folder)

    def probe(self, name: str) -> dict[str, Any]:
        """Return the settings of a probe."""
        return _mapping(_mapping(self.settings.get("probes")).get(name))

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the run comes from, as its settings record it."""
        return _mapping(self.settings.get("provenance"))

    @cached_property
    def row_numbers(self) -> Mapping[Any, Any]:
        """The row numbers of each metric in the table, by (file, evaluation, name)."""
        return self.table.groupby(["file", "evaluation", "name"], sort=False).indices

    def names(self, source: Source = MEASURED) -> list[str]:
        return [name for *origin, name in self.row_numbers if tuple(origin) == source]

    @property
    def evaluations(self) -> list[Source]:
        """The evaluations of checkpoints."""
        return [*dict.fromkeys(Source("", evaluation) for _, evaluation, _ in self.row_numbers if evaluation)]

    @property
    def evaluations_of_all(self) -> list[Source]:
        """The trainer's own evaluation, recorded or not, and those of checkpoints."""
        return [TRAINERS_EVALUATION, *self.evaluations]

    @cached_property
    def _by_step(self) -> pd.DataFrame:
        return self.table.set_index("step")

    @cached_property
    def _is_finite(self) -> np.ndarray:
        """Which rows of the table have a value that can be calculated with."""
        return np.abs(self.table["value"].to_numpy()) < LARGEST

    @cached_property
    def results_by_function(self) -> dict[Callable[[Run], Any], Any]:
        """What `once_per_run` has calculated, by function."""
        return {}

    @cached_property
    def _tables(self) -> dict[tuple[str, str, str, bool], pd.DataFrame]:
        """A cache of tables, because a report asks for most of them many times."""
        return {}

    def _cached_rows(self, source: Source, name: str, finite_only: bool) -> pd.DataFrame:
        numbers = self.row_numbers.get((*source, name))
        # All without rows are one table.
        key = (*source, name, finite_only) if numbers is not None else ("", "", "", False)
        if key not in self._tables:
            numbers = np.empty(0, dtype=int) if numbers is None else numbers
            self._tables[key] = self._by_step.iloc[numbers[self._is_finite[numbers]] if finite_only else numbers]
        return self._tables[key]

    def rows(self, name: str, source: Source = MEASURED) -> pd.DataFrame:
        """Return this metric's rows by step, empty if it was not recorded. Do not change the table: it is cached."""
        return self._cached_rows(source, name, finite_only=False)

    def finite_rows(self, name: str, source: Source = MEASURED) -> pd.DataFrame:
        """Return the rows of this metric with a finite value, by step. Do not change the table: it is cached."""
        return self._cached_rows(source, name, finite_only=True)

    def estimates(self, name: str, source: Source = MEASURED) -> dict[int, Estimate]:
        """Return this metric's estimates by step."""
        return to_estimates(self.rows(name, source))

    def last(self, name: str) -> Estimate | None:
        """Return the last finite value of this metric as an estimate, or None."""
        return last_of(self.finite_rows(name))

    def measured_steps(self, name: str) -> int:
        """Return the number of measured steps that the last of this metric's running means averages."""
        steps = self.finite_rows(name)["measured_steps"]
        return 0 if steps.empty or not math.isfinite(steps.iloc[-1]) else int(steps.iloc[-1])

    def with_interval(self, name: str) -> pd.DataFrame:
        """Return this metric's rows with the intervals that were recorded separately, as NAME_low and NAME_high."""
        rows = self.rows(name)
        low = self.rows(f"{name}_low")["value"].reindex(rows.index)
        high = self.rows(f"{name}_high")["value"].reindex(rows.index)
        is_recorded = low.notna() & high.notna()
        ends = {"low": low.where(is_recorded, rows["low"]), "high": high.where(is_recorded, rows["high"])}
        return rows.assign(**ends, is_interval=is_recorded | rows["is_interval"])

    def values(self, name: str, source: Source = MEASURED) -> pd.Series[float]:
        """Return the finite values of this metric by step."""
        return self.finite_rows(name, source)["value"]

    def logged(self, name: str) -> pd.Series[float]:
        """Return the finite values of this metric in metrics.jsonl, by step."""
        return self.values(name, LOGGED)

    @property
    def entropy_is_the_trainers(self) -> bool:
        """Whether token entropy is what the trainer logs, which has more steps than a probe has measured."""
        return len(self.logged("entropy")) > len(self.values("entropy/token"))

    def token_entropy(self) -> pd.Series[float]:
        """Return token entropy by step, in nats: a probe's, or the trainer's if that has more steps."""
        return self.token_entropy_rows()["value"]

    def token_entropy_rows(self) -> pd.DataFrame:
        """Return the finite rows of token entropy by step. Do not change the table: it is cached."""
        if self.entropy_is_the_trainers:
            return self.finite_rows("entropy", LOGGED)
        return self.finite_rows("entropy/token")

    @property
    def last_step(self) -> int:
        """The last known step: logged, measured, or saved in a checkpoint."""
        saved = map(step_of, checkpoints_of(self.folder))
        return max([self.steps[-1], *self.table["step"].unique().tolist(), *saved])

    def until(self, step: int) -> Run:
        """Return the run with its records up to this step."""
        steps = [logged for logged in self.steps if logged <= step]
        return replace(self, steps=steps, table=self.table[self.table["step"] <= step])


def _mapping(node: Any) -> dict[str, Any]:
    return node if isinstance(node, dict) else {}


def once_per_run(function: Callable[[Run], Result]) -> Callable[[Run], Result]:
    """Return the function, which then calculates its result once for each run. Do not change the result."""

    @functools.wraps(function)
    def cached(run: Run) -> Result:
        if function not in run.results_by_function:
            run.results_by_function[function] = function(run)
        return cast("Result", run.results_by_function[function])

    return cached
