"""Analyses of checkpoints as pandas DataFrames: RUN/offline/NAME/checkpoint-N/result.json, and their logs.

docs/reference/run_folder.md explains the keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from rl_training.records.files.damaged import naming_the_file
from rl_training.records.files.limited import MAX_RESULT_BYTES, read_text
from rl_training.records.files.printable import escape_surrogates
from rl_training.records.files.unpack import whole_content
from rl_training.records.folder import OFFLINE
from rl_training.records.json_values import checked_count, checked_text, from_json, parse_json

RESULT_FILE = "result.json"
ABOUT = ["analysis", "checkpoint", "step", "kind"]
VARIED = ["evaluation_size", "eta", "update_prompts", "update_filtered", "update_seed"]
NUMBERS = ["deltaH1", "deltaH_true", "deltaH_snis", "deltaH_odd", "paired_error", "paired_error_odd", "covariance"]
ALONE = ["ESS", "H_orig", "avg_reward", "learning_rate"]
SIZES = ("B_E", "N_E", "B_U", "G")
PRECONDITIONED = ("name", "delta_h1", "delta_h1_same_gain")
NO_NUMBERS = ("name", "update_filtered")  # columns of its tables that hold other types
LINEAR = ["deltaH1", "deltaH1_se", "deltaH1_sequence", "deltaH1_sequence_se"]  # proportional to the size of the step
ANALYSIS_COLUMNS = [
    *ABOUT, *VARIED, *(f"{name}{suffix}{se}" for name in NUMBERS for suffix in ("", "_sequence") for se in ("", "_se")),
    *ALONE,
]  # fmt: skip
LOG_COLUMNS = ["path", "checkpoint", "step", "time", "level", "seconds"]
SUMMARY = "_summary.json"  # end of the file name of a log's summary


def analysis_results(folder: str | Path) -> pd.DataFrame:
    """Return a row per prediction with its measurement, of all analyses in a folder (a run, or RUN/offline/NAME).

    The columns are ANALYSIS_COLUMNS. Changes are in nats, `…_se` is one standard error, and numbers that were not asked
    for are nan. `kind` is "whole" for the analysis itself and, in sweeps, "eta" for another multiple of the step,
    "size" for fewer sequences of E, "update" for another U. `step` counts the optimizer steps before the checkpoint:
    the step that is analyzed is the next one. There are no rows if there is no analysis.

    Raises:
        UserError: If a file is damaged; names it.
    """
    return table_of_analyses(read_analyses(folder))


def read_analyses(folder: str | Path) -> dict[Path, dict[str, Any]]:
    """Return the content of each result.json in a folder (a run, or RUN/offline/NAME), by path.

    Raises:
        UserError: If a file is damaged; names it.
    """
    folder = Path(folder)
    below = folder / OFFLINE if (folder / OFFLINE).is_dir() else folder
    return {path: read_analysis(path) for path in sorted(below.rglob(RESULT_FILE))}


def table_of_analyses(analyses: Mapping[Path, Mapping[str, Any]]) -> pd.DataFrame:
    """Return the table of `analysis_results` from the content of each result.json, by path."""
    rows = [row for path, content in analyses.items() for row in _rows_in(content, path)]
    table = pd.DataFrame(rows, columns=ANALYSIS_COLUMNS)
    return table.astype({name: float for name in ANALYSIS_COLUMNS if name not in ABOUT and name != "update_filtered"})


def read_analysis(path: str | Path) -> dict[str, Any]:
    """Return the content of a result.json. Numbers that are not available are nan; `reasons` says why.

    Raises:
        UserError: If the file is damaged, or lacks a number that reports show; names it.
    """
    with naming_the_file(Path(path), "is not a result of a checkpoint analysis", "delete it"):
        content: dict[str, Any] = from_json(parse_json(read_text(Path(path), MAX_RESULT_BYTES)), verbatim=("settings",))
        results = {key: float(value) for key, value in content["results"].items()}
        results.setdefault("N_E", results["B_E"])  # earlier versions wrote the sequences as B_E
        content["results"] = {key: value if math.isfinite(value) else math.nan for key, value in results.items()}
        checked_count(content["step"])
        checked_text(content["checkpoint"])
        for row in (row for rows in content["tables"].values() for row in rows):
            row |= {key: float(value) for key, value in row.items() if key not in NO_NUMBERS}
        # Check that every number that reports show is there.
        list(_rows_in(content, Path(path)))
        [content["results"][name] for name in SIZES]
        [row[name] for row in content["tables"].get("conditioning", []) for name in PRECONDITIONED]
    return content


def _rows_in(content: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the table rows of the result.json at this path: the analysis itself, then its variations."""
    results = content["results"]
    settings = content["settings"]["offline"]
    tables = content["tables"]
    whole = {
        "analysis": escape_surrogates(path.resolve().parents[1].name), "checkpoint": content["checkpoint"],
        "step": content["step"], "kind": "whole", "evaluation_size": results["N_E"], "eta": 1.0,
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
    """Return a row per finished log in a folder, at any depth, by step and time: checkpoint, level, core numbers.

    The columns are LOG_COLUMNS and the core numbers of the logs. There are no rows if there is no log.

    Raises:
        UserError: If a summary is damaged; names it.
    """
    rows = []
    # Sorted without the ending, so that …_2, the second log of one second, comes after the first.
    stems = sorted(str(path).removesuffix(SUMMARY) for path in Path(folder).rglob(f"entropy_probe_*{SUMMARY}"))
    for stem in stems:
        summary = Path(stem + SUMMARY)
        log = f"{stem}.json.gz" if Path(f"{stem}.json.gz").is_file() else f"{stem}.json"
        with naming_the_file(summary, "is not a summary of a checkpoint analysis", "delete it"):
            content = json.loads(read_text(summary))
            facts = {key: content[key] for key in ("checkpoint", "step", "time", "level")}
            rows.append({"path": log, **facts, **content["core"], "seconds": content["timing"].get("all")})
    table = pd.DataFrame(rows) if rows else pd.DataFrame(columns=LOG_COLUMNS)
    return table.sort_values(["step", "time"], ignore_index=True)


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
    path.stat()  # a file that is missing is not damaged
    with naming_the_file(path, "is not a log of a checkpoint analysis", "delete it"):
        return _tables_in(json.loads(whole_content(path)))


def _tables_in(content: dict[str, Any]) -> dict[str, pd.DataFrame]:
    timing = pd.DataFrame({"phase": list(content["timing"]), "seconds": list(content["timing"].values())})
    tables = {"results": _results(content), "timing": timing}
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
    numbers = content.get("results", content["core"])
    reasons = content["reasons"]
    rows = [
        {"name": name, "value": value, "stderr": numbers.get(f"{name}_se"), "reason": reasons.get(name, "")}
        for name, value in numbers.items()
        if not name.endswith("_se")
    ]
    return pd.DataFrame(rows).astype({"value": float, "stderr": float})
