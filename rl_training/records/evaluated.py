"""The files that evaluations of a run's checkpoints write, and their reader.

    RUN/evaluations/<name>/settings.json                what was asked for; the same for all checkpoints
    RUN/evaluations/<name>/step_N/metrics.json          every number with its standard error, or why there is none
    RUN/evaluations/<name>/step_N/responses.jsonl[.gz]  every response with its prompt and scores
    RUN/evaluations/<name>/consolidated_metrics.csv     a row per step and metric, with the columns COLUMNS

Files are there whole or not at all, and metrics.json is written last: without it a step was not evaluated.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rl_training.errors import UserError
from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.spreadsheet import as_csv
from rl_training.records.jsonl import MOST, checked_count, checked_text, parse_json, to_json
from rl_training.statistics.estimate import Estimate

IN_TRAINING = "in training"  # the name of the evaluation that the trainer itself makes, with trainer.eval_strategy
TABLE_FILE = "consolidated_metrics.csv"
METRICS = "metrics.json"
RESPONSES = "responses.jsonl"
SETTINGS = "settings.json"
COLUMNS = ["step", "metric", "value", "stderr", "num_prompts", "low", "high"]  # the last two: Estimate.interval
MAKE_ROOM = "make room, and run the same command again; nothing that was finished is lost"


def write_settings(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that this evaluation was started with; a new one stores the given settings."""
    path = folder / SETTINGS
    if not path.is_file():
        write_atomically({path: json.dumps(settings, indent=2).encode()}, MAKE_ROOM)
    return json.loads(path.read_text(encoding="utf-8"))


def write_step(
    folder: Path,
    step: int,
    about: Mapping[str, Any],
    metrics: Mapping[str, Estimate],
    responses: Sequence[Mapping[str, Any]],
    compress: bool = False,
) -> None:
    """Write the two files of step_N, or none. Raises OSError, naming the file, on a full disk.

    about  what else metrics.json says, beside the numbers: which checkpoint it was, how long it took
    """
    rows = (json.dumps(to_json(row, infinite_as_text=True), ensure_ascii=False) + "\n" for row in responses)
    text = "".join(rows).encode(errors="backslashreplace")  # half a character is written as JSON does: \\ud800
    names = (RESPONSES, f"{RESPONSES}.gz")
    numbers = {
        name: {
            "value": e.value, "stderr": e.stderr, "num_prompts": e.num_samples, "reason": e.reason,
            "interval": e.interval,
        }
        for name, e in metrics.items()
    }  # fmt: skip
    content = to_json({"step": step, **about, "metrics": numbers}, infinite_as_text=True)
    home = folder / f"step_{step}"
    # Without a time in the header, the same responses make the same bytes.
    packed = {home / names[compress]: gzip.compress(text, mtime=0) if compress else text}
    write_atomically({**packed, home / METRICS: json.dumps(content, indent=2).encode()}, MAKE_ROOM)
    (home / names[not compress]).unlink(missing_ok=True)  # of an evaluation before this one


def read_step(folder: Path, step: int) -> dict[str, Any] | None:
    """Return what metrics.json says of this step, null as nan; None when it was not evaluated.

    Raises ValueError for a damaged one, naming it.
    """
    path = folder / f"step_{step}" / METRICS
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        content["metrics"] = {name: _numbers_of(row) for name, row in content["metrics"].items()}
    except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged ({said}): delete its folder, and evaluate the run again") from error
    return content


def _numbers_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of a metric, each fact of its own kind; raises an error of Python's where one is not."""
    value, stderr = (math.nan if row[key] is None else float(row[key]) for key in ("value", "stderr"))
    counted, said = checked_count(row["num_prompts"]), checked_text(row["reason"])
    return {
        "value": value,
        "stderr": stderr,
        "num_prompts": counted,
        "reason": said,
        "interval": _pair(row["interval"]),
    }


def _pair(ends: Any) -> tuple[float, float] | None:
    if ends is None:
        return None
    low, high = map(float, ends)
    return low, high


def read_table(folder: Path) -> pd.DataFrame:
    """Return the numbers of all evaluated steps, in their order: COLUMNS and `reason`; no rows before the first."""
    names = (path.parent.name.removeprefix("step_") for path in folder.glob(f"step_*/{METRICS}"))
    steps = sorted({int(name) for name in names if name.isdecimal() and int(name) <= MOST})  # step_8.old is none
    rows = [
        {"step": step, "metric": name, **row, **dict(zip(("low", "high"), row["interval"] or (), strict=False))}
        for step in steps
        if (content := read_step(folder, step))
        for name, row in content["metrics"].items()
    ]
    table = pd.DataFrame(rows, columns=[*COLUMNS, "reason"])
    return table.astype(dict.fromkeys(("value", "stderr", "low", "high"), float))


def consolidate(folder: Path) -> Path:
    """Return the path of the rebuilt table of all evaluated steps, for other programs."""
    path = folder / TABLE_FILE
    write_atomically({path: as_csv(read_table(folder)[COLUMNS], missing="nan")}, MAKE_ROOM)
    return path


def estimates_in(table: pd.DataFrame) -> list[Estimate]:
    """Return the number of each row."""
    return [
        Estimate(value, stderr, int(num), reason, interval=None if math.isnan(low) else (low, high))
        for value, stderr, num, low, high, reason in table[[*COLUMNS[2:], "reason"]].itertuples(index=False)
    ]


def largest_pass_at(metrics: Iterable[str]) -> str:
    """Return the metric pass_at_k of the largest k; "" where there is none."""
    by_k = {int(k): f"pass_at_{k}" for m in metrics if (k := m.removeprefix("pass_at_")) != m and k.isdecimal()}
    return by_k[max(by_k)] if by_k else ""
