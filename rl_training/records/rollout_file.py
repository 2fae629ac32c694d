"""logs/rollouts.jsonl.gz: the sequences of some steps, a line each, on request (rollouts.every=N).

Each step is a gzip member of its own, closed and hence flushed: what a kill leaves of the last one is read up to there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_training.records.atomic_write import write_atomically
from rl_training.records.json_values import complete_lines, from_json, parsed_lines, to_json

ROLLOUTS_FILE = "rollouts.jsonl.gz"
MAKE_ROOM = "the run's records cannot be written: make room, then go on with resume=latest"


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
        write_atomically({path: gzip.compress(kept.encode())}, MAKE_ROOM)


def read_rollouts(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of rollouts.jsonl.gz, null as nan; empty when none were asked for.

    Raises ValueError with the number of a line that cannot be read.
    """
    return list(iterate_rollouts(folder))


def iterate_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yields what `read_rollouts` returns, line by line."""
    path = Path(folder) / ROLLOUTS_FILE
    if path.is_file():
        yield from map(from_json, parsed_lines(path, complete_lines(path)))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(to_json(row), ensure_ascii=False) + "\n"
