"""A run's records as pandas DataFrames, for notebooks and analyses of your own.

Of several runs: `pd.concat({run.name: metrics(run) for run in find_runs("runs")}, names=["run"])`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from scipy.special import stdtrit

from rl_training.records.evaluated import EVALUATIONS, IN_TRAINING, TABLE_FILE, EvaluatedMetric, read_table
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import (
    METRICS_FILE,
    iterate_rollouts,
    logs_of,
    read_estimates,
    read_evaluations,
    read_metrics,
)

PROBE_COLUMNS = [
    "step", "about_step", "world_size", "probe", "name", "value", "stderr", "half_width", "num_samples", "reason",
]  # fmt: skip
ROLLOUT_COLUMNS = [
    "step", "prompt", "response", "prompt_index", "reward", "advantage", "length", "logp", "importance_ratio",
]  # fmt: skip
EVALUATION_COLUMNS = ["evaluation", *EvaluatedMetric._fields]


def metrics(run: str | Path) -> pd.DataFrame:
    """Returns logs/metrics.jsonl as a table: a row per logged step (the index), a column per metric.

    What a step did not log is nan. Raises FileNotFoundError when the folder is no run, and ValueError for a damaged
    line, naming the file.
    """
    table = pd.DataFrame(read_metrics(logs_of(run))).set_index("step")
    return table.apply(pd.to_numeric, errors="coerce")  # an infinite number is recorded as a string


def probes(run: str | Path) -> pd.DataFrame:
    """Returns logs/probes.jsonl as a table: a row per estimate, with the columns of PROBE_COLUMNS and then `detail`s.

    `half_width` is that of the 95 % Student-t interval, t_{.975, num_samples−1} · stderr; nan without an error.
    `reason` says why a value or an error is nan. No rows when no probe ran. Raises as `metrics` does.
    """
    table = pd.DataFrame(read_estimates(logs_of(run)))
    table = table.reindex(columns=[*PROBE_COLUMNS, *(column for column in table if column not in PROBE_COLUMNS)])
    for column in ("value", "stderr"):
        table[column] = pd.to_numeric(table[column], errors="coerce")
    table["half_width"] = stdtrit(table["num_samples"].astype(float) - 1, 0.975) * table["stderr"]
    return table


def rollouts(run: str | Path) -> pd.DataFrame:
    """Returns logs/rollouts.jsonl.gz as a table: a row per recorded sequence, with the columns of ROLLOUT_COLUMNS.

    No rows when none were recorded (rollouts.every). Raises ValueError for a damaged line.
    """
    return pd.DataFrame(iterate_rollouts(logs_of(run)), columns=ROLLOUT_COLUMNS)


def evaluations(run: str | Path) -> pd.DataFrame:
    """Returns all evaluations of a run's checkpoints: a row per evaluation, step and metric; see EVALUATION_COLUMNS.

    `evaluation` is the folder's name in RUN/evaluations, or "in training" for those that the trainer made itself
    (logs/evaluations.jsonl: their metrics without the leading eval_, errors and number of prompts). No rows when there
    are none. Raises as `metrics` does.
    """
    logs = logs_of(run)
    last = {row["step"]: row for row in read_evaluations(logs)}  # of several at a step, the last counts
    rows = [
        (IN_TRAINING, EvaluatedMetric(step, name.removeprefix("eval_"), float(value), math.nan, math.nan))
        for step, row in last.items()
        for name, value in row.items()
        if name.startswith("eval_") and isinstance(value, int | float)  # infinite ones are recorded as strings
    ]
    tables = sorted(logs.parent.glob(f"{EVALUATIONS}/*/{TABLE_FILE}"))
    rows += [(table.parent.name, row) for table in tables for row in read_table(table.parent)]
    return pd.DataFrame([(name, *row) for name, row in rows], columns=EVALUATION_COLUMNS)


def find_runs(folder: str | Path) -> list[Path]:
    """Returns the run folders in `folder`, at any depth and sorted by path; the folder alone when it is a run itself.

    A run is a folder with logs/metrics.jsonl. Raises FileNotFoundError when there is none.
    """
    folder = Path(folder)
    if (folder / LOGS_FOLDER / METRICS_FILE).is_file():
        return [folder]
    runs = sorted(file.parent.parent for file in folder.rglob(f"{LOGS_FOLDER}/{METRICS_FILE}"))
    if not runs:
        raise FileNotFoundError(
            f"{folder / LOGS_FOLDER / METRICS_FILE} is missing, here and in all folders below: give the folder of "
            "a run that has logged at least one step, the one that holds logs/, or a folder of such runs"
        )
    return runs
