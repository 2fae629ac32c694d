"""A run's records and checkpoint analyses as pandas DataFrames, for notebooks and your own analyses.

For several runs: `pd.concat({run.name: metrics(run) for run in find_runs("runs")}, names=["run"])`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.special import stdtrit

from rl_training.errors import UserError
from rl_training.limited_files import MAX_RESULT_BYTES, read_text
from rl_training.records import jsonl
from rl_training.records.evaluated import COLUMNS, IN_TRAINING, read_table
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.files.unpack import whole_content
from rl_training.records.folder import EVALUATIONS, LOGS_FOLDER, OFFLINE
from rl_training.records.json_values import checked_count, checked_text, from_json, parse_json
from rl_training.records.jsonl import METRICS_FILE, logs_of

PROBE_COLUMNS = [
    "step", "about_step", "world_size", "probe", "name", "value", "stderr", "half_width", "num_samples", "reason",
]  # fmt: skip
ROLLOUT_COLUMNS = [
    "step", "prompt", "response", "prompt_index", "reward", "advantage", "length", "logp", "importance_ratio",
]  # fmt: skip
EVALUATION_COLUMNS = ["evaluation", *COLUMNS, "reason"]
RESULT_FILE = "result.json"
ABOUT = ["analysis", "checkpoint", "step", "kind"]
VARIED = ["evaluation_size", "eta", "update_prompts", "update_filtered", "update_seed"]
NUMBERS = ["deltaH1", "deltaH_true", "deltaH_snis", "deltaH_odd", "paired_error", "paired_error_odd", "covariance"]
ALONE = ["ESS", "H_orig", "avg_reward", "learning_rate"]
SIZES, PRECONDITIONED = ("B_E", "B_U", "G"), ("name", "delta_h1", "delta_h1_same_gain")
NO_NUMBERS = ("name", "update_filtered")  # columns of its tables that hold other types
LINEAR = ["deltaH1", "deltaH1_se", "deltaH1_sequence", "deltaH1_sequence_se"]  # proportional to the size of the step
ANALYSIS_COLUMNS = [
    *ABOUT, *VARIED, *(f"{name}{unit}{se}" for name in NUMBERS for unit in ("", "_sequence") for se in ("", "_se")),
    *ALONE,
]  # fmt: skip
SUMMARY = "_summary.json"  # end of the file name of a log's summary


def metrics(run: str | Path) -> pd.DataFrame:
    """Return logs/metrics.jsonl as a table: a row per logged step (the index), a column per metric.

    Values that a step did not log are nan.

    Raises:
        UserError: If the folder is not a run, or a line is damaged; names the file.
    """
    table = pd.DataFrame(jsonl.read_metrics(logs_of(run))).set_index("step")
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
    table["half_width"] = stdtrit(table["num_samples"].astype(float) - 1, 0.975) * table["stderr"]
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
        for step, row in last.items()
        for name, value in row.items()
        if name.startswith("eval_") and isinstance(value, int | float)  # infinite values are strings
    ]
    tables = [pd.DataFrame(in_training, columns=EVALUATION_COLUMNS[:4])]
    for folder in sorted(logs.parent.glob(f"{EVALUATIONS}/*")):
        tables.append(read_table(folder).assign(evaluation=escape_surrogates(folder.name)))
    some = [table for table in tables if len(table)] or tables[:1]  # a table without rows has no column types
    return pd.concat(some, ignore_index=True).reindex(columns=EVALUATION_COLUMNS)


def find_runs(folder: str | Path) -> list[Path]:
    """Return the run folders in `folder`, at any depth and sorted by path, or `folder` alone if it is a run itself.

    A run is a folder with logs/metrics.jsonl.

    Raises:
        UserError: If there is none.
    """
    folder = Path(folder)
    if (folder / LOGS_FOLDER / METRICS_FILE).is_file():
        return [folder]
    runs = sorted(file.parent.parent for file in folder.rglob(f"{LOGS_FOLDER}/{METRICS_FILE}"))
    if not runs:
        raise UserError(
            f"{folder / LOGS_FOLDER / METRICS_FILE} is missing, here and in all folders below: give the folder of "
            "a run that has logged at least one step, the one that holds logs/, or a folder of such runs"
        )
    return runs


# --- analyses of checkpoints: RUN/offline/NAME/checkpoint-N/result.json; logs: docs/reference/run_folder.md --------


def analysis_results(folder: str | Path) -> pd.DataFrame:
    """Return a row per prediction with its measurement, of all analyses in a folder (a run, or RUN/offline/NAME).

    The columns are ANALYSIS_COLUMNS. Changes are in nats, `…_se` is one standard error, and numbers that were not asked
    for are nan. `kind` is "whole" for the analysis itself and, in sweeps, "eta" for another multiple of the step,
    "size" for fewer sequences of E, "update" for another U. `step` counts the optimizer steps before the checkpoint:
    the step that is analyzed is the next one. There are no rows if there is no analysis.

    Raises:
        UserError: If a file is damaged; names it.
    """
    folder = Path(folder)
    below = folder / OFFLINE if (folder / OFFLINE).is_dir() else folder
    rows = [row for path in sorted(below.rglob(RESULT_FILE)) for row in _rows_in(read_analysis(path), path)]
    table = pd.DataFrame(rows, columns=ANALYSIS_COLUMNS)
    return table.astype({name: float for name in ANALYSIS_COLUMNS if name not in ABOUT and name != "update_filtered"})


def read_analysis(path: str | Path) -> dict[str, Any]:
    """Return the content of a result.json. Numbers that are not available are nan; `reasons` says why.

    Raises:
        UserError: If the file is damaged, or lacks a number that reports show; names it.
    """
    try:
        content: dict[str, Any] = from_json(parse_json(read_text(Path(path), MAX_RESULT_BYTES)))
        results = {key: float(value) for key, value in content["results"].items()}
        content["results"] = {key: value if math.isfinite(value) else math.nan for key, value in results.items()}
        checked_count(content["step"])
        checked_text(content["checkpoint"])
        for row in (row for rows in content["tables"].values() for row in rows):
            row |= {key: float(value) for key, value in row.items() if key not in NO_NUMBERS}
        # Check that every number that reports show is there.
        list(_rows_in(content, Path(path)))
        [content["results"][name] for name in SIZES]
        [row[name] for row in content["tables"].get("conditioning", []) for name in PRECONDITIONED]
    except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not a result of a checkpoint analysis ({said}): delete it") from error
    return content


def _rows_in(content: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the table rows of the result.json at this path: the analysis itself, then its variations."""
    results, settings, tables = content["results"], content["settings"]["offline"], content["tables"]
    whole = {
        "analysis": escape_surrogates(path.parents[1].name), "checkpoint": content["checkpoint"],
        "step": content["step"], "kind": "whole", "evaluation_size": results["B_E"], "eta": 1.0,
        "update_prompts": results["B_U"], "update_filtered": bool(settings["update"]["filtered"]),
        "update_seed": float(settings["update"]["seed"]),
        **{name: results.get(name) for name in ANALYSIS_COLUMNS if name in results},
    }  # fmt: skip
    yield whole
    bare = {name: whole[name] for name in (*ABOUT, *VARIED)}
    for row in tables.get("eta", []):
        if row["eta"] != 1.0:
            predicted = {name: row["eta"] * results[name] for name in LINEAR}
            yield {**bare, "kind": "eta", **predicted, **row}
    for kind, name in (("size", "sizes"), ("update", "updates")):
        yield from ({**bare, "kind": kind, **row} for row in tables.get(name, []))


def probe_logs(folder: str | Path) -> pd.DataFrame:
    """Return a row per finished log in a folder, at any depth, by step and time: checkpoint, level, core numbers."""
    rows = []
    # Sorted without the ending, so that …_2, the second log of one second, comes after the first.
    stems = sorted(str(path).removesuffix(SUMMARY) for path in Path(folder).rglob(f"entropy_probe_*{SUMMARY}"))
    for stem in stems:
        content = json.loads(read_text(Path(stem + SUMMARY)))
        log = f"{stem}.json.gz" if Path(f"{stem}.json.gz").is_file() else f"{stem}.json"
        facts = {key: content[key] for key in ("checkpoint", "step", "time", "level")}
        rows.append({"path": log, **facts, **content["core"], "seconds": content["timing"].get("all")})
    table = pd.DataFrame(rows)
    return table if table.empty else table.sort_values(["step", "time"], ignore_index=True)


def read_probe_log(path: str | Path) -> dict[str, pd.DataFrame]:
    """Return the tables of a log by name. Its level decides which there are.

    results       name, value, stderr, reason; at level minimal the core numbers alone
    timing        phase, seconds
    statistics    a row per quantity: mean, sd, min, q25, median, q75, max
    eta           the change at each multiple of the step; conditioning: the change under each preconditioner
    evaluation    a row per sequence of E; update: a row per sequence of U
    tokens        a row per token of E: sequence, position, log-probability, entropy, …

    Raises:
        FileNotFoundError: If there is no such file.
        UserError: If the file is not a log of a checkpoint analysis.
    """
    path = Path(path)
    try:
        content = json.loads(whole_content(path))
        timing = pd.DataFrame({"phase": list(content["timing"]), "seconds": list(content["timing"].values())})
        tables = {"results": _results(content), "timing": timing}
    except FileNotFoundError:
        raise
    except (KeyError, ValueError, OSError) as error:
        raise UserError(f"{path} is not a log of a checkpoint analysis ({error})") from error
    if "statistics" in content:
        tables["statistics"] = pd.DataFrame(content["statistics"]).T
    tables |= {name: pd.DataFrame(rows) for name, rows in content.get("tables", {}).items()}
    tables |= {name: pd.DataFrame(content[name]) for name in ("evaluation", "update", "tokens") if name in content}
    if "tokens" in tables:
        names = [column for column in tables["tokens"] if column != "sequence"]
        table = tables["tokens"].explode(names, ignore_index=True).astype(dict.fromkeys(names, float))
        table.insert(1, "position", table.groupby("sequence").cumcount())
        tables["tokens"] = table
    return tables


def _results(content: dict[str, Any]) -> pd.DataFrame:
    numbers, reasons = content.get("results", content["core"]), content["reasons"]
    rows = [
        {"name": name, "value": value, "stderr": numbers.get(f"{name}_se"), "reason": reasons.get(name, "")}
        for name, value in numbers.items()
        if not name.endswith("_se")
    ]
    return pd.DataFrame(rows).astype({"value": float, "stderr": float})
