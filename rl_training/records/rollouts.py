"""logs/rollouts.jsonl.gz: the sequences of some steps, a line each, on request (rollouts.every=N).

Each step is a gzip member of its own, closed and hence flushed: what a kill leaves of the last one is read up to there.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROLLOUTS_FILE = "rollouts.jsonl.gz"


def append_rollouts(folder: Path, step: int, sequences: Iterable[Mapping[str, Any]]) -> None:
    """Writes the sequences of a step, in one piece. Raises OSError on a full disk."""
    rows = [{"step": step, **sequence} for sequence in sequences]
    member = gzip.compress("".join(_line(row) for row in rows).encode())
    with open(folder / ROLLOUTS_FILE, "ab") as file:
        file.write(member)


def drop_rollouts_after(folder: Path, step: int) -> None:
    """Drops the sequences of steps after this one, and what a kill has left of an unfinished one."""
    path = folder / ROLLOUTS_FILE
    if path.is_file():
        kept = "".join(_line(row) for row in iterate_rollouts(folder) if row["step"] <= step)
        scratch = path.with_suffix(".tmp")
        scratch.write_bytes(gzip.compress(kept.encode()))
        scratch.replace(path)  # in one move


def read_rollouts(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of rollouts.jsonl.gz, null as nan; empty when none were asked for.

    Raises ValueError with the number of a line that cannot be read.
    """
    return list(iterate_rollouts(folder))


def iterate_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yields what `read_rollouts` returns, line by line."""
    path = Path(folder) / ROLLOUTS_FILE
    for number, line in enumerate(_complete_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error}): mend or delete that line, or the file"
            ) from error
        yield {key: math.nan if value is None else value for key, value in row.items()}


def _complete_lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        return
    with gzip.open(path, "rt", encoding="utf-8") as file:
        try:
            for line in file:
                if line.endswith("\n"):
                    yield line
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return  # the unfinished last member


def _line(row: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, ensure_ascii=False) + "\n"
