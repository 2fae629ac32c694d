"""What the probe `measured` says of single steps. It may measure several steps together (`measured/steps`)."""

from __future__ import annotations

import pandas as pd

from rl_training.records.table.estimates import finite
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import Estimate

SPAN = "measured/steps"
REWARD_SUM = "measured/cumulative_reward"  # of the paid reward; of each function, with its name after a slash
SOME_STEPS = "some_steps"  # code of the remark on a sum that lacks steps: probes/running_sum.py


def per_step(run: Run, name: str) -> pd.DataFrame:
    """Return the finite rows of a metric of the probe, divided by the steps that each spans."""
    rows = run.finite_rows(name)
    steps = run.rows(SPAN)["value"].reindex(rows.index)
    return finite(rows.assign(**{column: rows[column] / steps for column in ("value", "stderr", "low", "high")}))


def of_one_step(run: Run, name: str) -> pd.DataFrame:
    """Return the finite rows of a metric of the probe that tell of one step, not of several together."""
    rows = run.finite_rows(name)
    steps = run.rows(SPAN)["value"].reindex(rows.index)
    return rows[steps.isna() | (steps == 1)]


def of_steps(total: Estimate, of_all: str) -> str:
    """Return what a sum of measured effects is over: by its remark, such as "over 4 of 9 steps", or `of_all`."""
    return total.message if total.code == SOME_STEPS else of_all
