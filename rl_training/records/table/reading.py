"""Read a run's records into one table: a row per number, from all files."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pandas as pd

from rl_training.records.evaluated import IN_TRAINING
from rl_training.records.files.links import refuse_links_out
from rl_training.records.files.printable import printable
from rl_training.records.frames import evaluations, metrics, probes
from rl_training.records.jsonl import EVALUATIONS_FILE, METRICS_FILE, PROBES_FILE
from rl_training.records.table.config_file import read_config
from rl_training.records.table.missing import NO_REASON
from rl_training.records.table.series import Run
from rl_training.statistics.estimate import half_widths

logger = logging.getLogger(__name__)

# file: of logs/; "" for an evaluation of checkpoints, whose name is `evaluation`.
# low, high: ends of the 95 % interval. is_interval: they were recorded, instead of following from stderr.
# measured_steps: number of steps that a running mean averages. code: of a reason; "" if it has none.
# strength: of an intervention whose name does not say it.
NUMBERS = ["value", "stderr", "num_samples", "low", "high", "measured_steps", "strength"]
RUN_COLUMNS = ["file", "evaluation", "name", "step", "about_step", *NUMBERS, "is_interval", "reason", "code", "probe"]


def read_run(folder: Path) -> Run:
    """Return the records of the run in `folder`.

    Raises:
        UserError: If there are none, they cannot be read, or a link leads out of the run; names the file.
    """
    refuse_links_out(folder)
    logged = metrics(folder)
    measured = probes(folder)
    _warn_of_shared_names(folder, measured)
    sources = [
        _one_row_per_number(logged).assign(file=METRICS_FILE, evaluation=""),
        measured.sort_values("step", kind="stable").assign(file=PROBES_FILE, evaluation=""),
        _evaluation_rows(evaluations(folder)),
    ]
    table = _with_all_columns(pd.concat(sources, ignore_index=True))
    top_tokens = measured[measured["name"].str.startswith("top_token/")] if len(measured) else measured
    return Run(folder, logged.index.tolist(), table, read_config(folder), top_tokens)


def _evaluation_rows(evaluated: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of all evaluations. The trainer's own ones come from a file of logs/."""
    # They have no number of prompts, whatever a folder of evaluations is called.
    is_trainers = (evaluated["evaluation"] == IN_TRAINING) & evaluated["num_prompts"].isna()
    return evaluated.rename(columns={"metric": "name", "num_prompts": "num_samples"}).assign(
        file=np.where(is_trainers, EVALUATIONS_FILE, ""), evaluation=evaluated["evaluation"].mask(is_trainers, "")
    )


def _with_all_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with RUN_COLUMNS, one per number and step, with reasons and intervals where none are recorded."""
    table = rows.reindex(columns=RUN_COLUMNS)
    table = table.drop_duplicates(["file", "evaluation", "name", "step"], keep="last").astype({"step": int})
    table[NUMBERS] = table[NUMBERS].apply(pd.to_numeric, errors="coerce").astype(float)
    table["num_samples"] = table["num_samples"].where(np.isfinite(table["num_samples"]), 0)
    table["reason"] = table["reason"].fillna("")
    table["code"] = table["code"].fillna("")
    table.loc[table["value"].isna() & (table["reason"] == ""), "reason"] = NO_REASON
    half = half_widths(table["num_samples"].to_numpy(), table["stderr"].to_numpy())
    table["is_interval"] = table["low"].notna() & table["high"].notna()
    table["low"] = table["low"].where(table["is_interval"], table["value"] - half)
    table["high"] = table["high"].where(table["is_interval"], table["value"] + half)
    return table


def _warn_of_shared_names(folder: Path, measured: pd.DataFrame) -> None:
    """Warn of estimates that two probes recorded under one name, as those of one's own could."""
    by_probe = measured[["step", "name"]].assign(probe=measured["probe"].map(str))  # a damaged line may hold anything
    by_probe = by_probe.drop_duplicates()
    shared = by_probe[by_probe.duplicated(["step", "name"], keep=False)]
    for name, probes_of_name in shared.groupby("name")["probe"].unique().items():
        probes_named = " and ".join(map(repr, probes_of_name))
        logger.warning(printable(f"{folder}: probes {probes_named} recorded {name!r}; only the last one's is shown"))


def _one_row_per_number(logged: pd.DataFrame) -> pd.DataFrame:
    """Return a table of metrics by step with the columns name, step and value, whatever the metrics are called."""
    num_steps, num_metrics = logged.shape
    return pd.DataFrame(
        {
            "name": np.repeat(logged.columns.to_numpy(dtype=object), num_steps),
            "step": np.tile(logged.index.to_numpy(), num_metrics),
            "value": logged.to_numpy().T.ravel(),
        }
    )
