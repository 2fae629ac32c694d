"""A run's records as pandas DataFrames, for notebooks and your own analyses. analyses.py has its checkpoint analyses.

For several runs: `pd.concat({run.name: metrics(run) for run in find_runs("runs")}, names=["run"])`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pandas as pd

from rl_training.errors import UserError
from rl_training.records import jsonl
from rl_training.records.evaluated import COLUMNS, IN_TRAINING, read_table
from rl_training.records.files.printable import escape_surrogates, printable
from rl_training.records.folder import EVALUATIONS, LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE, has_records, has_steps, logs_of
from rl_training.statistics.estimate import half_widths

logger = logging.getLogger(__name__)

PROBE_COLUMNS = [
    "step", "about_step", "world_size", "probe", "name", "value", "stderr", "half_width", "num_samples", "reason",
]  # fmt: skip
ROLLOUT_COLUMNS = [
    "step", "prompt", "response", "prompt_index", "reward", "advantage", "length", "logp", "importance_ratio",
]  # fmt: skip
EVALUATION_COLUMNS = ["evaluation", *COLUMNS, "reason"]


def metrics(run: str | Path) -> pd.DataFrame:
    """Return logs/metrics.jsonl as a table: a row per logged step (the index, in order), a column per metric.

    Values that a step did not log are nan. Of several lines of one step, the last that has a metric counts.

    Raises:
        UserError: If the folder is not a run, or a line is damaged; names the file.
    """
    by_step = dict[int, dict[str, Any]]()
    for line in jsonl.read_metrics(logs_of(run)):
        by_step.setdefault(line["step"], {}).update(line)
    table = pd.DataFrame(by_step.values()).set_index("step").sort_index()
    return table.apply(pd.to_numeric, errors="coerce")  # an infinite number is recorded as a string


def probes(run: str | Path) -> pd.DataFrame:
    """Return logs/probes.jsonl as a table: a row per estimate, with PROBE_COLUMNS and then the fields of `detail`.

    `half_width` is half of the 95 % Student-t interval, t_{.975, num_samples−1} · stderr; nan without an error.
    `reason` says why a value or an error is nan. There are no rows if no probe ran. Raises as `metrics` does.
    """
    table = pd.DataFrame(jsonl.read_estimates(logs_of(run)))
    table = table.reindex(columns=[*PROBE_COLUMNS, *(column for column in table if column not in PROBE_COLUMNS)])
    for column in ("value", "stderr"):
        table[column] = pd.to_numeric(table[column], errors="coerce")
    table["half_width"] = half_widths(table["num_samples"].to_numpy(dtype=float), table["stderr"].to_numpy())
    return table


def rollouts(run: str | Path) -> pd.DataFrame:
    """Return logs/rollouts.jsonl.gz as a table: a row per recorded sequence, with ROLLOUT_COLUMNS.

    There are no rows if none were recorded (rollouts.every).

    Raises:
        UserError: If a line is damaged, or the folder is not a run.
    """
    return pd.DataFrame(jsonl.iterate_rollouts(logs_of(run)), columns=ROLLOUT_COLUMNS)


def evaluations(run: str | Path) -> pd.DataFrame:
    """Return all evaluations of a run's checkpoints: a row per evaluation, step and metric, with EVALUATION_COLUMNS.

    `evaluation` is a folder's name in RUN/evaluations, or "in training" for the trainer's own evaluations. Those come
    from logs/evaluations.jsonl: the leading eval_ is removed from their metrics, and they have no errors and no number
    of prompts. There are no rows if nothing was evaluated. Raises as `metrics` does.
    """
    logs = logs_of(run)
    last = {row["step"]: row for row in jsonl.read_evaluations(logs)}  # the last of several at one step counts
    in_training = [
        (IN_TRAINING, step, name.removeprefix("eval_"), float(value))
        for step, row in sorted(last.items())
        for name, value in row.items()
        if name.startswith("eval_") and isinstance(value, int | float)  # infinite values are strings
    ]
    tables = [pd.DataFrame(in_training, columns=EVALUATION_COLUMNS[:4])]
    for folder in sorted(logs.parent.glob(f"{EVALUATIONS}/*")):
        tables.append(read_table(folder).assign(evaluation=escape_surrogates(folder.name)))
    with_rows = [table for table in tables if len(table)] or tables[:1]  # a table without rows has no column types
    return pd.concat(with_rows, ignore_index=True).reindex(columns=EVALUATION_COLUMNS)


def find_runs(folder: str | Path) -> list[Path]:
    """Return the run folders in `folder`, at any depth and sorted by path, or `folder` alone if it is a run itself.

    A run is a folder with logs/metrics.jsonl. Runs below `folder` that have not logged a step are left out, with a
    warning.

    Raises:
        UserError: If there is none.
    """
    folder = Path(folder)
    if has_records(folder):
        return [folder]
    candidates = sorted(file.parent.parent for file in folder.rglob(f"{LOGS_FOLDER}/{METRICS_FILE}"))
    runs = [run for run in candidates if not has_records(run) or has_steps(run)]
    for run in candidates:
        if run not in runs:
            logger.warning(printable(f"{run} is left out: it has not logged a step yet"))
    if not runs:
        lacks = "holds no complete line" if candidates else "is missing"
        raise UserError(
            f"{folder / LOGS_FOLDER / METRICS_FILE} {lacks}, here and in all folders below: give the folder of "
            "a run that has logged at least one step, the one that holds logs/, or a folder of such runs"
        )
    return runs
