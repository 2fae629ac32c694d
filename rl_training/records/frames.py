"""A run's records and its checkpoint analyses as pandas DataFrames, for notebooks and analyses of your own.

Of several runs: `pd.concat({run.name: metrics(run) for run in find_runs("runs")}, names=["run"])`.
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
from rl_training.records import jsonl
from rl_training.records.evaluated import COLUMNS, IN_TRAINING, read_table
from rl_training.records.files.printable import in_whole_characters
from rl_training.records.files.unpack import whole_content
from rl_training.records.folder import EVALUATIONS, LOGS_FOLDER, OFFLINE
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
NO_NUMBERS = ("name", "update_filtered")  # of the columns of its tables
LINEAR = ["deltaH1", "deltaH1_se", "deltaH1_sequence", "deltaH1_sequence_se"]  # in the size of the step
ANALYSIS_COLUMNS = [
    *ABOUT, *VARIED, *(f"{name}{unit}{se}" for name in NUMBERS for unit in ("", "_sequence") for se in ("", "_se")),
    *ALONE,
]  # fmt: skip
SUMMARY = "_summary.json"  # ends the name of a log's summary


def metrics(run: str | Path) -> pd.DataFrame:
    """Return logs/metrics.jsonl as a table: a row per logged step (the index), a column per metric.

    What a step did not log is nan. Raises FileNotFoundError when the folder is no run, and ValueError for a damaged
    line, naming the file.
    """
    table = pd.DataFrame(jsonl.read_metrics(logs_of(run))).set_index("step")
    return table.apply(pd.to_numeric, errors="coerce")  # an infinite number is recorded as a string


def probes(run: str | Path) -> pd.DataFrame:
    """Return logs/probes.jsonl as a table: a row per estimate, with the columns of PROBE_COLUMNS and then `detail`s.

    `half_width` is that of the 95 % Student-t interval, t_{.975, num_samples−1} · stderr; nan without an error.
    `reason` says why a value or an error is nan. No rows when no probe ran. Raises as `metrics` does.
    """
    table = pd.DataFrame(jsonl.read_estimates(logs_of(run)))
    table = table.reindex(columns=[*PROBE_COLUMNS, *(column for column in table if column not in PROBE_COLUMNS)])
    for column in ("value", "stderr"):
        table[column] = pd.to_numeric(table[column], errors="coerce")
    table["half_width"] = stdtrit(table["num_samples"].astype(float) - 1, 0.975) * table["stderr"]
    return table


def rollouts(run: str | Path) -> pd.DataFrame:
    """Return logs/rollouts.jsonl.gz as a table: a row per recorded sequence, with the columns of ROLLOUT_COLUMNS.

    No rows when none were recorded (rollouts.every). Raises ValueError for a damaged line.
    """
    return pd.DataFrame(jsonl.iterate_rollouts(logs_of(run)), columns=ROLLOUT_COLUMNS)


def evaluations(run: str | Path) -> pd.DataFrame:
    """Return all evaluations of a run's checkpoints: a row per evaluation, step and metric; see EVALUATION_COLUMNS.

    `evaluation` is the folder's name in RUN/evaluations, or "in training" for those that the trainer made itself
    (logs/evaluations.jsonl: their metrics without the leading eval_, errors and number of prompts). No rows when there
    are none. Raises as `metrics` does.
    """
    logs = logs_of(run)
    last = {row["step"]: row for row in jsonl.read_evaluations(logs)}  # of several at a step, the last counts
    in_training = [
        (IN_TRAINING, step, name.removeprefix("eval_"), float(value))
        for step, row in last.items()
        for name, value in row.items()
        if name.startswith("eval_") and isinstance(value, int | float)  # infinite ones are recorded as strings
    ]
    tables = [pd.DataFrame(in_training, columns=EVALUATION_COLUMNS[:4])]
    for folder in sorted(logs.parent.glob(f"{EVALUATIONS}/*")):
        tables.append(read_table(folder).assign(evaluation=in_whole_characters(folder.name)))
    some = [table for table in tables if len(table)] or tables[:1]  # without rows, columns have no type
    return pd.concat(some, ignore_index=True).reindex(columns=EVALUATION_COLUMNS)


def find_runs(folder: str | Path) -> list[Path]:
    """Return the run folders in `folder`, at any depth and sorted by path; the folder alone when it is a run itself.

    A run is a folder with logs/metrics.jsonl. Raises FileNotFoundError when there is none.
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
    """Return a row per prediction and its truth, of all analyses in a folder (a run, or RUN/offline/NAME).

    kind   "whole": the analysis itself. Of sweeps: "eta", another multiple of the step; "size", fewer sequences of E;
           "update", another U
    step   optimizer steps behind the checkpoint: the step that is analysed is the next one

    Columns: ANALYSIS_COLUMNS. Numbers are in nats, `…_se` one standard error; what was not asked for is nan. No rows
    where there is no analysis. Raises ValueError for a damaged file, naming it.
    """
    folder = Path(folder)
    below = folder / OFFLINE if (folder / OFFLINE).is_dir() else folder
    rows = [row for path in sorted(below.rglob(RESULT_FILE)) for row in _rows_in(read_analysis(path), path)]
    table = pd.DataFrame(rows, columns=ANALYSIS_COLUMNS)
    return table.astype({name: float for name in ANALYSIS_COLUMNS if name not in ABOUT and name != "update_filtered"})


def read_analysis(path: str | Path) -> dict[str, Any]:
    """Return what a result.json holds; nan where a number is not available, with the reason in `reasons`."""
    try:
        content: dict[str, Any] = jsonl.from_json(jsonl.parse_json(Path(path).read_text(encoding="utf-8")))
        results = {key: float(value) for key, value in content["results"].items()}
        content["results"] = {key: value if math.isfinite(value) else math.nan for key, value in results.items()}
        jsonl.checked_count(content["step"])
        jsonl.checked_text(content["checkpoint"])
        for row in (row for rows in content["tables"].values() for row in rows):
            row |= {key: float(value) for key, value in row.items() if key not in NO_NUMBERS}
        # Nothing is missing in it that is shown.
        list(_rows_in(content, Path(path)))
        [content["results"][name] for name in SIZES]
        [row[name] for row in content["tables"].get("conditioning", []) for name in PRECONDITIONED]
    except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is no result of a checkpoint analysis ({said}): delete it") from error
    return content


def _rows_in(content: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a result.json that lies there: the analysis itself, and what was varied."""
    results, settings, tables = content["results"], content["settings"]["offline"], content["tables"]
    whole = {
        "analysis": in_whole_characters(path.parents[1].name), "checkpoint": content["checkpoint"],
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
    """Return a row per finished log in a folder, at any depth, by step and time: what it is of, its core numbers."""
    rows = []
    # By the name without its end: a second log of one second, …_2, comes after the first.
    stems = sorted(str(path).removesuffix(SUMMARY) for path in Path(folder).rglob(f"entropy_probe_*{SUMMARY}"))
    for stem in stems:
        content = json.loads(Path(stem + SUMMARY).read_text(encoding="utf-8"))
        log = f"{stem}.json.gz" if Path(f"{stem}.json.gz").is_file() else f"{stem}.json"
        about = {key: content[key] for key in ("checkpoint", "step", "time", "level")}
        rows.append({"path": log, **about, **content["core"], "seconds": content["timing"].get("all")})
    table = pd.DataFrame(rows)
    return table if table.empty else table.sort_values(["step", "time"], ignore_index=True)


def read_probe_log(path: str | Path) -> dict[str, pd.DataFrame]:
    """Return the tables of a log, those that its level has.

    results       name, value, stderr, reason: the core numbers alone at level minimal
    timing        phase, seconds
    statistics    a row per quantity: mean, sd, min, q25, median, q75, max
    eta           the change at each multiple of the step; conditioning: under each preconditioner
    evaluation    a row per sequence of E; update: of U
    tokens        a row per token of E: sequence, position, log-probability, entropy, …

    Raises FileNotFoundError when there is no such file, and ValueError when it is none of these logs.
    """
    path = Path(path)
    try:
        content = json.loads(whole_content(path))
        timing = pd.DataFrame({"phase": list(content["timing"]), "seconds": list(content["timing"].values())})
        tables = {"results": _results(content), "timing": timing}
    except FileNotFoundError:
        raise
    except (KeyError, ValueError, OSError) as error:
        raise UserError(f"{path} is no log of a checkpoint analysis ({error})") from error
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
