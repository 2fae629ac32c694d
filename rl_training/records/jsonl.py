"""What a run leaves behind: logs/metrics.jsonl and logs/probes.jsonl, written line by line, and their reader.

    metrics.jsonl   one flat line per log (with logging_steps=1: per optimizer step); key `step`
    evaluations.jsonl   the same for evaluations, where the trainer makes some
    probes.jsonl    one line per estimate: step, about_step, world_size, probe, name, value, stderr, num_samples, reason
                    (and, for some, what they describe: prompt, response, reward, advantage)
    rollouts.jsonl.gz   on request, the sequences of some steps: rollouts.py

Every line is flushed as it is written, so that a killed run keeps what it measured. nan is written as
null, an infinite number as a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_training.mathematics.estimate import Estimate
from rl_training.records.atomic_write import cannot_write, write_atomically
from rl_training.records.json_values import complete_lines, from_json, parsed_lines, to_json
from rl_training.records.rollout_file import MAKE_ROOM, ROLLOUTS_FILE, append_rollouts, drop_rollouts_after

METRICS_FILE = "metrics.jsonl"
PROBES_FILE = "probes.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


class Records:
    """Writes these files in `folder`. One process writes: rank 0.

    rollouts_every  write the sequences of every n-th step too, beginning with the first; 0 for none
    """

    def __init__(self, folder: str | Path, rollouts_every: int = 0) -> None:
        self.folder = Path(folder)
        self.rollouts_every = rollouts_every
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(self, after_step: int) -> None:
        """Drops the lines of steps that come after `after_step`: a resumed run takes those steps again."""
        for name in (METRICS_FILE, PROBES_FILE, EVALUATIONS_FILE):
            path = self.folder / name
            if path.exists():
                kept = [line for line, row in _parsed(path) if row["step"] <= after_step]
                write_atomically({path: "".join(kept).encode()}, MAKE_ROOM)  # a kill or a full disk loses nothing
        drop_rollouts_after(self.folder, after_step)

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._append(METRICS_FILE, [{"step": step, **metrics}])

    def write_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._append(EVALUATIONS_FILE, [{"step": step, **metrics}])

    def write_estimates(self, step: int, world_size: int, probe: str, estimates: Mapping[str, Estimate]) -> None:
        rows = [
            {
                "step": step,
                "about_step": step if e.about_step is None else e.about_step,
                "world_size": world_size,
                "probe": probe,
                "name": name,
                "value": e.value,
                "stderr": e.stderr,
                "num_samples": e.num_samples,
                "reason": e.reason,
                **({} if e.interval is None else dict(zip(("low", "high"), e.interval, strict=True))),
                **e.detail,
            }
            for name, e in estimates.items()
        ]
        self._append(PROBES_FILE, rows)

    def wants_rollouts_of(self, step: int) -> bool:
        """Returns whether the sequences of this step, counted from 1, are to be written."""
        return self.rollouts_every > 0 and (step - 1) % self.rollouts_every == 0

    def write_rollouts(self, step: int, sequences: Iterable[Mapping[str, Any]]) -> None:
        try:
            append_rollouts(self.folder, step, sequences)
        except OSError as error:
            raise cannot_write(self.folder / ROLLOUTS_FILE, error, MAKE_ROOM) from error

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        lines = (json.dumps(to_json(row, infinite_as_text=True)) + "\n" for row in rows)
        try:
            with open(self.folder / name, "a", encoding="utf-8") as file:  # closed, hence flushed, at each step
                file.write("".join(lines))
        except OSError as error:  # a full disk: the half of a line that may be there is dropped by the next `start`
            raise cannot_write(self.folder / name, error, MAKE_ROOM) from error


def _parsed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line with what it says. ValueError with the number of a line that cannot be read."""
    lines = list(complete_lines(path))
    for number, (line, row) in enumerate(zip(lines, parsed_lines(path, lines), strict=True), start=1):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number} has no `step`: mend or delete that line")
        yield line, row


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl as dictionaries, null as nan. Raises FileNotFoundError naming the file."""
    return _read(Path(folder) / METRICS_FILE)


def read_estimates(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of probes.jsonl as dictionaries, null as nan; empty when no probe ran."""
    path = Path(folder) / PROBES_FILE
    return _read(path) if path.exists() else []


def read_evaluations(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of evaluations.jsonl as dictionaries, null as nan; empty when the trainer evaluated nothing."""
    path = Path(folder) / EVALUATIONS_FILE
    return _read(path) if path.exists() else []


def _read(path: Path) -> list[dict[str, Any]]:
    return [from_json(row) for _, row in _parsed(path)]
