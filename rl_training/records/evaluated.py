"""The files that evaluations of a run's checkpoints write, and their readers.

    RUN/evaluations/<name>/settings.json                the request; the same for all checkpoints
    RUN/evaluations/<name>/step_N/metrics.json          every number with its standard error, or why there is none
    RUN/evaluations/<name>/step_N/responses.jsonl[.gz]  every response with its prompt and scores
    RUN/evaluations/<name>/consolidated_metrics.csv     a row per step and metric, with the columns COLUMNS

Files are written atomically, metrics.json last: a step without it has not been evaluated.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.damaged import naming_the_file
from rl_training.records.files.limited import MAX_RESULT_BYTES, read_text
from rl_training.records.files.spreadsheet import as_csv
from rl_training.records.json_values import MAX_COUNT, checked_count, checked_text, parse_json, to_json
from rl_training.statistics.estimate import Estimate

IN_TRAINING = "in training"  # name of the trainer's own evaluations (trainer.eval_strategy)
TABLE_FILE = "consolidated_metrics.csv"
STEP_METRICS_FILE = "metrics.json"
RESPONSES_FILE = "responses.jsonl"
EVALUATION_SETTINGS_FILE = "settings.json"
COLUMNS = ["step", "metric", "value", "stderr", "num_prompts", "low", "high"]  # low and high: Estimate.interval
RERUN_FIX = "make room, and run the same command again; nothing that was finished is lost"


@dataclass(frozen=True)
class MetricInfo:
    """How a metric is shown.

    Args:
        title: Of its column in the printed table; a comparison draws the metrics that have one.
        is_share: Whether its values usually lie between 0 and 1, and an axis of them does.
    """

    title: str = ""
    is_share: bool = False


# By name, the metrics that every evaluation has; pass_at stands for pass_at_1, pass_at_2, … with k in place of {}.
BUILT_IN_METRICS = {
    "reward": MetricInfo("reward", is_share=True),
    "greedy_accuracy": MetricInfo("greedy", is_share=True),
    "pass_at": MetricInfo("pass@{}", is_share=True),
    "majority": MetricInfo("majority", is_share=True),
    "entropy/token": MetricInfo("entropy/token"),
    "entropy/sequence": MetricInfo(),
    "kl/token": MetricInfo("KL/token"),
    "kl/sequence": MetricInfo(),
    "length": MetricInfo("length"),
    "truncated": MetricInfo(is_share=True),
    "format": MetricInfo(is_share=True),
}


def metric_info(name: str) -> MetricInfo:
    """Return how a metric is shown; one of the user's own has no title, and may have any values.

    >>> metric_info("pass_at_8").is_share, metric_info("format_errors/mean").is_share
    (True, False)
    """
    return BUILT_IN_METRICS.get(re.sub(r"^pass_at_\d+$", "pass_at", name), MetricInfo())


def store_settings_once(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that this evaluation was started with. A new evaluation stores the given ones.

    Raises:
        UserError: If the disk is full, or the stored settings are damaged; names the file.
    """
    path = folder / EVALUATION_SETTINGS_FILE
    if not path.is_file():
        write_atomically({path: json.dumps(settings, indent=2).encode()}, RERUN_FIX)
    with naming_the_file(path, "is damaged", "delete its folder, and evaluate the run again"):
        return dict(json.loads(read_text(path)).items())


def write_step(
    folder: Path,
    step: int,
    facts: Mapping[str, Any],
    metrics: Mapping[str, Estimate],
    responses: Sequence[Mapping[str, Any]],
    compress: bool = False,
) -> None:
    """Write the two files of step_N, both or neither.

    Args:
        facts: Further facts for metrics.json, such as the checkpoint and the time taken.

    Raises:
        UserError: If the disk is full; names the file.
    """
    rows = (json.dumps(to_json(row, infinite_as_text=True), ensure_ascii=False) + "\n" for row in responses)
    text = "".join(rows).encode(errors="backslashreplace")  # a lone surrogate becomes \\ud800, as in JSON
    names = (RESPONSES_FILE, f"{RESPONSES_FILE}.gz")
    numbers = {
        name: {
            "value": e.value, "stderr": e.stderr, "num_prompts": e.num_samples, "reason": e.reason,
            "interval": e.interval,
        }
        for name, e in metrics.items()
    }  # fmt: skip
    content = to_json({"step": step, **facts, "metrics": numbers}, infinite_as_text=True)
    home = folder / f"step_{step}"
    # mtime=0: the same responses always give the same bytes.
    responses_file = {home / names[compress]: gzip.compress(text, mtime=0) if compress else text}
    write_atomically({**responses_file, home / STEP_METRICS_FILE: json.dumps(content, indent=2).encode()}, RERUN_FIX)
    (home / names[not compress]).unlink(missing_ok=True)  # from an earlier evaluation


def read_step(folder: Path, step: int) -> dict[str, Any] | None:
    """Return the content of a step's metrics.json, null as nan; None if the step was not evaluated.

    Raises:
        UserError: If the file is damaged; names it.
    """
    path = folder / f"step_{step}" / STEP_METRICS_FILE
    if not path.is_file():
        return None
    with naming_the_file(path, "is damaged", "delete its folder, and evaluate the run again"):
        content: dict[str, Any] = parse_json(read_text(path, MAX_RESULT_BYTES))
        content["metrics"] = {name: _numbers_of(row) for name, row in content["metrics"].items()}
    return content


def _numbers_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one metric's entry, each field checked and converted. Raises Python's own errors if one is malformed."""
    return {
        **{key: math.nan if row[key] is None else float(row[key]) for key in ("value", "stderr")},
        "num_prompts": checked_count(row["num_prompts"]),
        "reason": checked_text(row["reason"]),
        "interval": _pair(row["interval"]),
    }


def _pair(ends: Any) -> tuple[float, float] | None:
    if ends is None:
        return None
    low, high = map(float, ends)
    return low, high


def read_table(folder: Path) -> pd.DataFrame:
    """Return the numbers of all evaluated steps, sorted by step: COLUMNS and `reason`. No rows if there are none."""
    names = (path.parent.name.removeprefix("step_") for path in folder.glob(f"step_*/{STEP_METRICS_FILE}"))
    # step_8.old does not count.
    steps = sorted({int(name) for name in names if name.isdecimal() and int(name) <= MAX_COUNT})
    rows = [
        {"step": step, "metric": name, **row, **dict(zip(("low", "high"), row["interval"] or (), strict=False))}
        for step in steps
        if (content := read_step(folder, step))
        for name, row in content["metrics"].items()
    ]
    table = pd.DataFrame(rows, columns=[*COLUMNS, "reason"])
    return table.astype(dict.fromkeys(("value", "stderr", "low", "high"), float))


def consolidate(folder: Path) -> Path:
    """Rewrite the CSV table of all evaluated steps, for other programs, and return its path."""
    path = folder / TABLE_FILE
    write_atomically({path: as_csv(read_table(folder)[COLUMNS], missing="nan")}, RERUN_FIX)
    return path


def estimates_in(table: pd.DataFrame) -> list[Estimate]:
    """Return the estimate in each row."""
    return [
        Estimate(value, stderr, int(num), reason, interval=None if math.isnan(low) else (low, high))
        for value, stderr, num, low, high, reason in table[[*COLUMNS[2:], "reason"]].itertuples(index=False)
    ]


def largest_pass_at(metrics: Iterable[str]) -> str:
    """Return the metric pass_at_k with the largest k, or ""."""
    by_k = {int(k): f"pass_at_{k}" for m in metrics if (k := m.removeprefix("pass_at_")) != m and k.isdecimal()}
    return by_k[max(by_k)] if by_k else ""
