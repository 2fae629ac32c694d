"""Where a run's entropy went: its measured change as a sum of causes and groups of layers, and of what is left.

For steps s with forward F_s and, from the next batch, backward B_{s+1}:

    H(last) − H(first) = Σ momentum + Σ gradient + Σ decay     parts of F_s, each also by group of layers
                       + Σ ½(B_{s+1} − F_s)                    the second order of the steps
                       + the rest                              what is not explained: steps without predictions, noise

The sum is exact because the rest is defined by it. Batches of different steps are independent, so variances add up over
steps. F_s and B_s share the noise of batch s. In the rest they have equal signs, so their standard errors add up. In
the second order they have opposite signs, and most of the noise cancels: there, with y_s = ½(B_s − F_s) of a batch, the
variance is ½ Σ (y_s − y_{s+1})², which counts true differences between steps as noise. Thresholds were chosen by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rl_training.records.pages.charts import BLUE, GREEN, GREY, ORANGE, TEXT, Chart, Series
from rl_training.records.pages.drawing import draw
from rl_training.records.pages.writing import milli
from rl_training.records.table.cumulative import sum_starts
from rl_training.records.table.estimates import by_about_step, finite, to_estimates
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference, is_significant, samples_of_sum

CAUSES = {  # by name in the records: what a page calls it, and its colour
    "momentum": ("momentum", BLUE),
    "gradient": ("this step's gradient", ORANGE),
    "decay": ("weight decay", GREEN),
}
OUTSIDE = "outside layers"
# Names of rows:
FIRST_ORDER = "first order"  # where the causes are not known
SECOND_ORDER = "second order"
REST = "not explained"
MEASURED = "measured"
MIN_PREDICTED_STEPS = 2  # predicted steps of a ledger
MIN_BATCHES = 8  # for a variance from the differences between neighbouring batches
ROW_HEIGHT = 24  # pixels


@dataclass(frozen=True)
class Entry:
    """A row of the ledger."""

    cause: str
    group: str  # of layers; "" for all parameters
    change: Estimate
    color: str

    @property
    def name(self) -> str:
        return f"{self.cause}, {self.group}" if self.group else self.cause


@dataclass(frozen=True)
class Ledger:
    """The change of entropy per token between two steps, and what it consists of."""

    first: int
    last: int
    num_predicted: int  # steps between them with forward and backward
    measured: Estimate
    first_order: Estimate  # the causes together
    causes: list[Entry]  # one for each cause that is not 0
    groups: list[Entry]  # the same by group of layers; [] if not recorded
    second_order: Estimate
    rest: Estimate

    @property
    def entries(self) -> list[Entry]:
        """The rows that add up to `measured`."""
        ends = [Entry(SECOND_ORDER, "", self.second_order, GREY), Entry(REST, "", self.rest, TEXT)]
        return [*(self.groups or self.causes), *ends]


def ledger_of(run: Run) -> Ledger | None:
    """Return the ledger of a run; None if fewer than MIN_PREDICTED_STEPS steps have both predictions."""
    levels = run.finite_rows("entropy/token")
    forward = run.finite_rows("delta_h/forward")
    backward = by_about_step(run.finite_rows("delta_h/backward"))
    steps = forward.index.intersection(backward.index).intersection(levels.index)
    steps = steps[steps + 1 <= max(levels.index, default=0)]
    if len(steps) < MIN_PREDICTED_STEPS:
        return None
    first = int(levels.index[0])
    last = int(levels.index[-1])
    measured = _measured(run, levels, first, last)
    forward = forward.loc[steps]
    backward = backward.loc[steps]
    second_order = _second_order(forward, backward)
    first_order = _sum(forward["value"], forward["stderr"] ** 2, forward)
    causes, groups = _entries(run, steps)
    if any(math.isnan(entry.change.value) for entry in causes):  # a split is missing at a step
        causes = [Entry(FIRST_ORDER, "", first_order, BLUE)]
        groups = []
    explained = sum(entry.change.value for entry in causes) + second_order.value
    rest = difference(measured, Estimate(explained, _stderr_of_trapezoids(forward, backward), measured.num_samples))
    return Ledger(first, last, len(steps), measured, first_order, causes, groups, second_order, rest)


def _measured(run: Run, levels: pd.DataFrame, first: int, last: int) -> Estimate:
    """Return the change between these steps: as recorded, which is what the summary shows, if it began at the first."""
    if sum_starts(run) == [first]:
        recorded = run.estimates("delta_h/cumulative_measured").get(last)
        if recorded is not None and math.isfinite(recorded.value):
            return recorded
    ends = to_estimates(levels.loc[[first, last]])
    return difference(ends[last], ends[first])


def _sum(values: pd.Series[float], variances: pd.Series[float], rows: pd.DataFrame) -> Estimate:
    """Return the sum over steps of independent values. Satterthwaite's degrees of freedom, from those of `rows`."""
    variance = float(variances.sum(skipna=False))
    if not math.isfinite(variance):
        return Estimate(float(values.sum()), reason="a step has no error bar")
    num_samples = samples_of_sum(variances, rows["num_samples"].clip(lower=2)) if variance else 2
    return Estimate(float(values.sum()), math.sqrt(variance), num_samples)


def _second_order(forward: pd.DataFrame, backward: pd.DataFrame) -> Estimate:
    """Return Σ ½(B_{s+1} − F_s) over the steps s that are the index of both."""
    halves = 0.5 * (backward["value"] - forward["value"])
    independent = _sum(halves, 0.25 * (forward["stderr"] ** 2 + backward["stderr"] ** 2), forward)
    backward_by_batch = backward.set_axis(backward.index + 1)
    both = forward.index.intersection(backward_by_batch.index)  # batches with both predictions
    if len(both) < MIN_BATCHES or not math.isfinite(independent.stderr):
        return independent  # an upper bound
    by_batch = 0.5 * (backward_by_batch["value"] - forward["value"]).loc[both].to_numpy()
    variance = 0.5 * len(both) * float(np.mean(np.diff(by_batch) ** 2))
    for rows in (forward, backward_by_batch):  # batches with one of the two
        variance += 0.25 * float((rows["stderr"].drop(both) ** 2).sum())
    return Estimate(float(halves.sum()), math.sqrt(variance), 1 + 2 * (len(both) - 1) // 3)


def _stderr_of_trapezoids(forward: pd.DataFrame, backward: pd.DataFrame) -> float:
    """Return the standard error of Σ ½(F_s + B_{s+1}) if F_s and B_s of a batch have the same noise."""
    if forward["stderr"].isna().any() or backward["stderr"].isna().any():
        return math.nan
    backward_by_batch = backward["stderr"].set_axis(backward.index + 1)
    by_batch = pd.concat([forward["stderr"], backward_by_batch], axis=1).fillna(0.0).sum(axis=1)
    return 0.5 * float(np.linalg.norm(by_batch))


def _entries(run: Run, steps: pd.Index[int]) -> tuple[list[Entry], list[Entry]]:
    """Return the sums over these steps by cause, and by cause and group of layers; without those that are 0."""
    names = run.names()
    causes = list[Entry]()
    groups = list[Entry]()
    for cause, (words, color) in CAUSES.items():
        causes.append(Entry(words, "", _sum_of(run, f"delta_h/part/{cause}", steps), color))
        prefix = f"delta_h/group/{cause}/"
        of_cause = [name for name in names if name.startswith(prefix) and not name.endswith("_sequence")]
        for name in sorted(of_cause, key=lambda name: name.endswith("outside")):  # last
            label = name.removeprefix(prefix)
            where = OUTSIDE if label == "outside" else f"{'layers' if '-' in label else 'layer'} {label}"
            groups.append(Entry(words, where, _sum_of(run, name, steps), color))
    causes = [entry for entry in causes if entry.change.value]
    groups = [entry for entry in groups if entry.change.value]
    return causes, groups if all(math.isfinite(entry.change.value) for entry in groups) else []


def _sum_of(run: Run, name: str, steps: pd.Index[int]) -> Estimate:
    rows = finite(run.rows(name)).reindex(steps)
    if rows["value"].isna().any():
        return Estimate.missing(f"{name} is missing at a step")
    return _sum(rows["value"], rows["stderr"] ** 2, rows)


def waterfall(account: Ledger) -> Chart:
    """Return the chart of a ledger: each row starts where the one above it ends; the last one is the whole."""
    series = []
    start = 0.0
    for entry in account.entries:
        series.append(_bar(entry.name, entry.color, start, entry.change))
        start += entry.change.value
    series.append(_bar(MEASURED, TEXT, 0.0, account.measured))
    names = [bar.label for bar in series]
    height = 10 + ROW_HEIGHT * len(series)
    return draw("ledger", series, names=names, height=height, first=account.first, last=account.last)


def _bar(name: str, color: str, start: float, change: Estimate) -> Series:
    (low, high) = change.bounds()
    end = start + change.value
    return Series(name, color, [end], [name], left=[start + low], right=[start + high], base=[start], line=False)


def table(account: Ledger) -> list[list[str]]:
    """Return the ledger as a table in thousandths: a column per cause, a row per group of layers if recorded."""
    columns = [entry.cause for entry in account.causes]
    rows = [
        _table_row(group, [entry for entry in account.groups if entry.group == group], columns)
        for group in dict.fromkeys(entry.group for entry in account.groups)
    ]
    ends = {SECOND_ORDER: account.second_order, REST: account.rest, MEASURED: account.measured}
    blank = [""] * len(columns)
    return [
        ["1e-3 nats per token", *columns, "sum"],
        *rows,
        [*_table_row("all layers", account.causes, columns)[:-1], milli(account.first_order)],
        *([name, *blank, milli(change)] for name, change in ends.items()),
    ]


def _table_row(name: str, entries: Sequence[Entry], columns: Sequence[str]) -> list[str]:
    """Return a row of the table; the error of its sum is at most the sum of its errors, which share batches."""
    by_cause = {entry.cause: entry.change for entry in entries}
    value = sum(entry.change.value for entry in entries)
    stderr = sum(entry.change.stderr for entry in entries)
    units = min((entry.change.num_samples for entry in entries), default=0)
    cells = [milli(by_cause[cause]) if cause in by_cause else "0" for cause in columns]
    return [name, *cells, milli(Estimate(value, stderr, units, "no error bar" if math.isnan(stderr) else ""))]


def caption(account: Ledger) -> str:
    """Say what the rows mean, how many steps are predicted, and whether anything is left to explain."""
    count = account.last - account.first
    num_missing = count - account.num_predicted
    size = "more than its error" if is_significant(account.rest) else "within its error"
    if num_missing:
        remark = f" It includes {num_missing} of {count} steps, which have no prediction."
    else:
        remark = " All layers and the second order together are the predicted ΔH of the summary."
    return (
        "± half of the 95 % interval; the variances of the steps add up, and the error of a group's sum is the sum of "
        "its errors, which is the most it can be. Momentum is what gradients of earlier steps "
        "still do. Second order is half of backward minus forward: what a straight line misses. The part that is not "
        f"explained makes the sum exact; it is {size}.{remark}"
    )
