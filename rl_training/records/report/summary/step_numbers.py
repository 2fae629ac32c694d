"""The table of what one step does: measured and predicted effects, as means over the last steps."""

from __future__ import annotations

import pandas as pd

from rl_training.records.pages.writing import MILLI, MISSING, format_estimate, percent, steps_of
from rl_training.records.table.estimates import by_about_step, finite, last_of, mean_of_rows
from rl_training.records.table.measured import per_step
from rl_training.records.table.series import Run
from rl_training.records.table.trends import RECENT
from rl_training.statistics.estimate import Estimate

STEP_NUMBERS = {  # by label: factor, measured metric, predicted metric of a step's effect
    "entropy, 1e-3 nats per token": (MILLI, "measured/delta_h", "delta_h/forward"),
    "reward, 1e-3": (MILLI, "measured/delta_reward", "delta_reward/forward"),
    "length, tokens": (1.0, "measured/delta_length", "delta_length/forward"),
    "KL to the step before, 1e-3 nats per token": (MILLI, "measured/kl", "kl/forward"),
}
# Why a value that is known has no share of it per step.
NO_SPAN = Estimate.missing("how many steps each value spans is not recorded")
MIN_MEASURED = 0.8  # share of the steps that must have been measured for a mean of them


def step_numbers(run: Run) -> list[list[str]]:
    """Return the table of STEP_NUMBERS, measured and predicted; [] if fewer than two rows have a number.

    Both columns are means over the same steps, the last ten that have both numbers; or over each one's own last ten.
    Where too many steps could not be measured, there is no mean: those that could are the ones that moved least.
    """
    rows = list[list[str]]()
    windows = list[str]()
    explained = set[str]()
    cut_off = run.logged("completions/clipped_ratio").tolist()[-1:]
    for label, (times, measured, predicted) in STEP_NUMBERS.items():
        columns = [
            by_about_step(per_step(run, measured)),
            by_about_step(run.finite_rows(predicted)),
        ]
        both = columns[0].index.intersection(columns[1].index)
        known = (columns[0].loc[both] if len(both) else columns[0]).tail(RECENT)
        all_rows = run.rows(measured)
        num_steps, num_known = _measured_steps(all_rows, known, columns[0])
        is_known = num_known >= MIN_MEASURED * num_steps
        columns = [known, (columns[1].loc[both] if len(both) and is_known else columns[1]).tail(RECENT)]
        if any(map(len, columns)):
            share = f" ({percent(cut_off[0])} of the responses are cut off)" if "length" in label and cut_off else ""
            means = [format_estimate(mean_of_rows(rows), True, times) for rows in columns]
            if not is_known:
                last = last_of(all_rows[~all_rows.index.isin(finite(all_rows).index)]) or NO_SPAN
                is_new = (last.code or last.reason) not in explained  # each reason once in the table
                explained.add(last.code or last.reason)
                why = f": {last.reason.partition(':')[0]}" * is_new
                means[0] = f"{MISSING} (known of {num_known} of {num_steps} steps{why})"
                columns[0] = columns[0].iloc[:0]
            rows.append([label + share, *means])
            window = " and ".join(dict.fromkeys(steps_of(rows.index) for rows in columns if len(rows)))
            is_part = is_known and num_known < num_steps
            windows.append(f"{num_known} of {num_steps} steps, {window}" if is_part else window)
    if len(rows) < 2:
        return []
    is_one = len(set(windows)) == 1
    if not is_one:
        rows = [
            [f"{label}, {window}" if window else label, *cells]
            for (label, *cells), window in zip(rows, windows, strict=True)
        ]
    return [[f"by one step, mean of {windows[0]}" if is_one else "by one step, mean", "measured", "predicted"], *rows]


def _measured_steps(all_rows: pd.DataFrame, shown: pd.DataFrame, known: pd.DataFrame) -> tuple[int, int]:
    """Return how many steps a metric was to be measured at since the first shown one, and at how many it was.

    Args:
        all_rows: All rows of the metric, also those without a value.
        shown: The rows that are to be averaged, by the step that they are about.
        known: All rows with a value, likewise.
    """
    first = shown.index.min() if len(shown) else 0
    steps = all_rows["about_step"].fillna(all_rows.index.to_series()).unique()
    return int((steps >= first).sum()), int((known.index >= first).sum())
