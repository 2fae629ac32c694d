"""The table of what one step does: measured and predicted effects, as means over the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from rl_training.records.pages.writing import MILLI, MISSING, format_estimate, percent, steps_of
from rl_training.records.table.estimates import by_about_step, finite, last_of, mean_of_rows
from rl_training.records.table.measured import per_step
from rl_training.records.table.series import Run
from rl_training.records.table.trends import RECENT
from rl_training.statistics.estimate import Estimate

# Why a value that is known has no share of it per step.
NO_SPAN = Estimate.missing("how many steps each value spans is not recorded")
MIN_MEASURED = 0.8  # share of the steps that must have been measured for a mean of them
MIN_ROWS = 2  # of a table


class Quantity(NamedTuple):
    """What a step changes.

    Args:
        label: Its name, with the unit that it is shown in.
        factor: What its recorded unit is multiplied with.
        measured, predicted: The metrics of a step's effect on it.
    """

    label: str
    factor: float
    measured: str
    predicted: str


LENGTH = Quantity("length, tokens", 1.0, "measured/delta_length", "delta_length/forward")
QUANTITIES = (
    Quantity("entropy, 1e-3 nats per token", MILLI, "measured/delta_h", "delta_h/forward"),
    Quantity("reward, 1e-3", MILLI, "measured/delta_reward", "delta_reward/forward"),
    LENGTH,
    Quantity("KL to the step before, 1e-3 nats per token", MILLI, "measured/kl", "kl/forward"),
)


@dataclass(frozen=True)
class Coverage:
    """At how many steps an effect was measured.

    Args:
        num_steps: The steps that it was to be measured at, since the first one that a mean would average.
        num_known: Those with a value.
        gap: The last estimate without a value.
    """

    num_steps: int
    num_known: int
    gap: Estimate

    @classmethod
    def of(cls, all_rows: pd.DataFrame, known: pd.DataFrame, averaged: pd.DataFrame) -> Coverage:
        """Return the coverage of a metric.

        Args:
            all_rows: All rows of the metric, also those without a value.
            known: Those with a value, by the step that they are about.
            averaged: The ones of these that a mean would average.
        """
        first = averaged.index.min() if len(averaged) else 0
        steps = all_rows["about_step"].fillna(all_rows.index.to_series()).unique()
        gap = last_of(all_rows[~all_rows.index.isin(finite(all_rows).index)])
        return cls(int((steps >= first).sum()), int((known.index >= first).sum()), gap or NO_SPAN)

    @property
    def is_enough(self) -> bool:
        """Whether a mean is fair: the steps that cannot be measured are those that moved furthest."""
        return self.num_known >= MIN_MEASURED * self.num_steps

    @property
    def text(self) -> str:
        return f"{self.num_known} of {self.num_steps} steps"

    @property
    def reason(self) -> str:
        """What identifies the reason of the gap."""
        return self.gap.code or self.gap.reason


@dataclass(frozen=True)
class StepRow:
    """A row of the table.

    Args:
        label: What a step changes.
        window: The steps that the means cover; "" without a mean.
        measured: The mean measured effect, as text; "" if too few steps were measured.
        predicted: The mean predicted effect, as text.
        coverage: At how many steps it was measured.
    """

    label: str
    window: str
    measured: str
    predicted: str
    coverage: Coverage

    def cells(self, with_window: bool, with_reason: bool) -> list[str]:
        """Return the cells of the row, with its own window, and with the reason why there is no measured mean."""
        label = f"{self.label}, {self.window}" if with_window and self.window else self.label
        reason = f": {self.coverage.gap.message}" if with_reason else ""
        return [label, self.measured or f"{MISSING} (known of {self.coverage.text}{reason})", self.predicted]


def step_numbers(run: Run) -> list[list[str]]:
    """Return the table of QUANTITIES, measured and predicted, its headings first; [] if it has fewer than two rows.

    Both columns are means over the same steps, the last ten that have both numbers; or over each one's own last ten.
    """
    rows = [row for row in (_row(run, quantity) for quantity in QUANTITIES) if row]
    if len(rows) < MIN_ROWS:
        return []
    is_one_window = len({row.window for row in rows}) == 1
    heading = f"by one step, mean of {rows[0].window}" if is_one_window else "by one step, mean"
    explaining = _first_of_each_reason(rows)
    cells = [row.cells(with_window=not is_one_window, with_reason=row in explaining) for row in rows]
    return [[heading, "measured", "predicted"], *cells]


def _row(run: Run, quantity: Quantity) -> StepRow | None:
    """Return the row of a quantity; None without a number."""
    measured = by_about_step(per_step(run, quantity.measured))
    predicted = by_about_step(run.finite_rows(quantity.predicted))
    both = measured.index.intersection(predicted.index)
    averaged = (measured.loc[both] if len(both) else measured).tail(RECENT)
    coverage = Coverage.of(run.rows(quantity.measured), measured, averaged)
    if averaged.empty and predicted.empty:
        return None
    if not coverage.is_enough:
        latest = predicted.tail(RECENT)
        return StepRow(_label(run, quantity), _window([latest]), "", _mean(latest, quantity), coverage)
    beside = (predicted.loc[both] if len(both) else predicted).tail(RECENT)
    window = _window([averaged, beside])
    if coverage.num_known < coverage.num_steps:
        window = f"{coverage.text}, {window}"
    return StepRow(_label(run, quantity), window, _mean(averaged, quantity), _mean(beside, quantity), coverage)


def _label(run: Run, quantity: Quantity) -> str:
    """Return the label, for lengths with the share of responses that are cut off."""
    cut_off = run.logged("completions/clipped_ratio")
    if quantity is not LENGTH or cut_off.empty:
        return quantity.label
    return f"{quantity.label} ({percent(cut_off.iloc[-1])} of the responses are cut off)"


def _mean(rows: pd.DataFrame, quantity: Quantity) -> str:
    return format_estimate(mean_of_rows(rows), signed=True, times=quantity.factor)


def _window(columns: Sequence[pd.DataFrame]) -> str:
    """Return the steps that the rows of these columns are about, in words."""
    return " and ".join(dict.fromkeys(steps_of(rows.index) for rows in columns if len(rows)))


def _first_of_each_reason(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the rows without a measured mean that say why: each reason is said once in the table."""
    by_reason = dict[str, StepRow]()
    for row in rows:
        if not row.measured:
            by_reason.setdefault(row.coverage.reason, row)
    return list(by_reason.values())
