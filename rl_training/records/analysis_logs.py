"""The logs of checkpoint analyses, as pandas DataFrames. What they hold: docs/reference/analysis_logs.md."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd

SUMMARY = "_summary.json"
ROWS = ("evaluation", "update", "tokens")


def probe_logs(folder: str | Path) -> pd.DataFrame:
    """Returns a row per log in a folder, at any depth: its path, checkpoint, step, time, level, and its core numbers.

    Sorted by step and time. Unfinished logs are not listed. What is not available is nan.
    """
    rows = []
    for summary in sorted(Path(folder).rglob(f"entropy_probe_*{SUMMARY}"), key=_stem):
        content = json.loads(summary.read_text(encoding="utf-8"))
        about = {key: content[key] for key in ("checkpoint", "step", "time", "level")}
        rows.append({"path": _log_of(summary), **about, **content["core"], "seconds": content["timing"].get("all")})
    table = pd.DataFrame(rows)
    return table if table.empty else table.sort_values(["step", "time"], ignore_index=True)


def read_probe_log(path: str | Path) -> dict[str, pd.DataFrame]:
    """Returns the tables of a log, those that its level has.

    results       name, value, stderr, reason: the core numbers alone at level minimal
    timing        phase, seconds
    statistics    a row per quantity: mean, sd, min, q25, median, q75, max
    eta           the change at each multiple of the step; conditioning: under each preconditioner
    evaluation    a row per sequence of E; update: of U
    tokens        a row per token of E: sequence, position, log-probability, entropy, …

    Raises FileNotFoundError when there is no such file, and ValueError when it is none of these logs.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        tables = {"results": _results(content), "timing": _timing(content)}
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"{path} is no log of a checkpoint analysis ({error})") from error
    if "statistics" in content:
        tables["statistics"] = pd.DataFrame(content["statistics"]).T
    tables |= {name: pd.DataFrame(rows) for name, rows in content.get("tables", {}).items()}
    tables |= {name: pd.DataFrame(content[name]) for name in ROWS if name in content}
    if "tokens" in tables:
        tables["tokens"] = _one_row_per_token(tables["tokens"])
    return tables


def _stem(summary: Path) -> Path:
    """Returns the path of a log without the end of its name: a second log of one second, …_2, comes after the first."""
    return summary.with_name(summary.name.removesuffix(SUMMARY))


def _log_of(summary: Path) -> str:
    stem = _stem(summary).name
    packed = summary.with_name(f"{stem}.json.gz")
    return str(packed if packed.is_file() else summary.with_name(f"{stem}.json"))


def _results(content: dict[str, Any]) -> pd.DataFrame:
    numbers, reasons = content.get("results", content["core"]), content["reasons"]
    rows = [
        {"name": name, "value": value, "stderr": numbers.get(f"{name}_se"), "reason": reasons.get(name, "")}
        for name, value in numbers.items()
        if not name.endswith("_se")
    ]
    return pd.DataFrame(rows).astype({"value": float, "stderr": float})


def _timing(content: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame({"phase": list(content["timing"]), "seconds": list(content["timing"].values())})


def _one_row_per_token(table: pd.DataFrame) -> pd.DataFrame:
    table = table.explode([column for column in table if column != "sequence"], ignore_index=True)
    table.insert(1, "position", table.groupby("sequence").cumcount())
    return table.astype({column: float for column in table if column not in ("sequence", "position")})
