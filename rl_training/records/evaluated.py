"""The files that evaluations of a run's checkpoints write, and their reader.

    RUN/evaluations/<name>/settings.json                what was asked for; the same for all checkpoints
    RUN/evaluations/<name>/step_N/metrics.json          every number with its standard error, or why there is none
    RUN/evaluations/<name>/step_N/responses.jsonl[.gz]  every response with its prompt and scores
    RUN/evaluations/<name>/consolidated_metrics.csv     a row per step and metric, with the columns COLUMNS

A step's folder and the table are there whole or not at all: written under another name, then renamed.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from rl_training.mathematics.estimate import Estimate
from rl_training.records.atomic_write import cannot_write, write_atomically
from rl_training.records.jsonl import to_json

EVALUATIONS = "evaluations"  # folder of a run
IN_TRAINING = "in training"  # the name of the evaluation that the trainer itself makes, with trainer.eval_strategy
TABLE_FILE = "consolidated_metrics.csv"
METRICS = "metrics.json"
RESPONSES = "responses.jsonl"
SETTINGS = "settings.json"
LOCK = ".lock"
COLUMNS = ["step", "metric", "value", "stderr", "num_prompts", "low", "high"]  # the last two: Estimate.interval
MAKE_ROOM = "nothing that was finished is lost: make room, and run the same command again"


def write_settings(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that this evaluation was started with; a new one stores the given settings."""
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
    """Writes step_N with its two files, whole or not at all. Raises OSError, naming the file, on a full disk.

    about  what else metrics.json says, beside the numbers: which checkpoint it was, how long it took
    """
    scratch, final = folder / f".step_{step}.partial", folder / f"step_{step}"
    shutil.rmtree(scratch, ignore_errors=True)  # of a kill before this one
    try:
        scratch.mkdir(parents=True)
        rows = (json.dumps(to_json(row, infinite_as_text=True), ensure_ascii=False) + "\n" for row in responses)
        text = "".join(rows).encode()
        # Without a time in the header, the same responses make the same bytes.
        packed = gzip.compress(text, mtime=0) if compress else text
        (scratch / f"{RESPONSES}{'.gz' * compress}").write_bytes(packed)
        numbers = {
            name: {
                "value": e.value, "stderr": e.stderr, "num_prompts": e.num_samples, "reason": e.reason,
                "interval": e.interval,
            }
            for name, e in metrics.items()
        }  # fmt: skip
        content = to_json({"step": step, **about, "metrics": numbers}, infinite_as_text=True)
        (scratch / METRICS).write_text(json.dumps(content, indent=2), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise cannot_write(final, error, MAKE_ROOM) from error


def read_step(folder: Path, step: int) -> dict[str, Any] | None:
    """Returns what metrics.json says of this step, null as nan; None when it was not evaluated."""
    path = folder / f"step_{step}" / METRICS
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for row in content["metrics"].values():
        row["value"], row["stderr"] = (math.nan if row[key] is None else float(row[key]) for key in ("value", "stderr"))
    return content


def consolidate(folder: Path) -> Path:
    """Returns the path of the rebuilt table of all evaluated steps, in their order."""
    path = folder / TABLE_FILE
    steps = sorted(int(step.name.removeprefix("step_")) for step in folder.glob("step_*"))
    rows = [
        (step, name, row["value"], row["stderr"], row["num_prompts"], *(row.get("interval") or (math.nan, math.nan)))
        for step in steps
        if (content := read_step(folder, step))
        for name, row in content["metrics"].items()
    ]
    table = pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False, na_rep="nan")
    write_atomically({path: table.encode()}, MAKE_ROOM)
    return path


def read_table(folder: Path) -> pd.DataFrame:
    """Returns an evaluation's consolidated table; no rows where there is none yet.

    Raises ValueError for a damaged one, naming it. Tables may be older than the columns `low` and `high`.
    """
    path, needed = folder / TABLE_FILE, COLUMNS[:5]
    if not path.is_file():
        return pd.DataFrame(columns=COLUMNS)
    try:
        table = pd.read_csv(path, float_precision="round_trip", dtype={"step": int, "metric": str, "num_prompts": int})
        if not isinstance(table.index, pd.RangeIndex):  # pandas shifts such lines to the left
            raise ValueError("a line has more fields than the first")
        known = table[needed].astype({"value": float, "stderr": float})
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is not a table of {', '.join(needed)} ({error}): delete it, and evaluate the run again; finished "
            "checkpoints are not evaluated again"
        ) from error
    return known.join(table.filter(["low", "high"])).reindex(columns=COLUMNS)


def estimates_in(table: pd.DataFrame) -> list[Estimate]:
    """Returns the number of each row; metrics.json has the reasons of those that are missing."""
    return [
        Estimate(value, stderr, int(num), "see metrics.json", interval=None if math.isnan(low) else (low, high))
        for value, stderr, num, low, high in table[COLUMNS[2:]].itertuples(index=False)
    ]


def largest_pass_at(metrics: Iterable[str]) -> str:
    """Returns the metric pass_at_k of the largest k; "" where there is none."""
    return max(
        (m for m in metrics if m.startswith("pass_at_")), key=lambda m: int(m.removeprefix("pass_at_")), default=""
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that one process at a time can enter, however it ends. ValueError names the process that is in it."""
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=0).acquire()
        path.write_text(f"process {os.getpid()} on {os.uname().nodename}", encoding="utf-8")
    except Timeout as error:
        other = path.read_text(encoding="utf-8") or "another process"
        raise ValueError(f"{folder} is being written to by {other}: wait until it has ended, or stop it") from error
    except OSError as error:
        raise cannot_write(path, error, "an evaluation is written here: give output=FOLDER") from error
    with lock:
        yield
