"""The files in logs/, written line by line, and their readers.

    metrics.jsonl       one flat line per log (per optimizer step with logging_steps=1); key `step`
    evaluations.jsonl   the same for the trainer's own evaluations, if it makes any
    probes.jsonl        one line per estimate: step, about_step, world_size, probe, name, value, stderr, num_samples,
                        reason (and, for some, the reason's code and details: prompt, response, reward, advantage)
    rollouts.jsonl.gz   on request (rollouts.every=N), the sequences of some steps, one per line
    settings.json       the settings of a training without config.yaml

Each step's lines are flushed when they are written, so a killed run keeps what it measured. The sequences of each step
are one gzip member. nan is written as null, an infinite number as a string (in rollouts.jsonl.gz as null).
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.records.failure import FAILURE_FILE
from rl_training.records.files.append import append_whole
from rl_training.records.files.atomic_write import cannot_write, write_atomically
from rl_training.records.files.limited import read_text
from rl_training.records.files.masking import without_secrets
from rl_training.records.files.unpack import whole_lines
from rl_training.records.folder import LOGS_FOLDER, has_settings
from rl_training.records.json_values import (
    checked_count,
    checked_number,
    checked_text,
    from_json,
    parse_json,
    plain_settings,
    to_json,
)
from rl_training.statistics.estimate import Estimate

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SETTINGS_FILE = "settings.json"  # of a training without config.yaml
PROBES_FILE = "probes.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl.gz"
MAX_NAMED_RUNS = 5  # that an error lists
RESUME_FIX = "make room, then resume from the latest checkpoint"


class Records:
    """Writes these files into a folder. Only rank 0 writes.

    Args:
        folder: The `logs` folder; created if it is missing.
        rollouts_every: Write the sequences of every n-th step too, beginning with the first; 0 for none.
        fix: What errors tell the user to do if a file cannot be written.

    Attributes:
        on_write_error: Called with the file and the error if lines cannot be written. They are then left out. None
            raises UserError instead.
    """

    on_write_error: Callable[[Path, OSError], None] | None = None

    def __init__(self, folder: str | Path, rollouts_every: int = 0, fix: str = RESUME_FIX) -> None:
        self.folder = Path(folder)
        self.rollouts_every = rollouts_every
        self.fix = fix
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(self, after_step: int, settings: Mapping[str, Any] | None = None, has_failed: bool = False) -> None:
        """Begin after a step: write the settings, and drop the lines of later steps, which a resumed run takes again.

        Args:
            after_step: The step. 0 for a new run.
            settings: The settings that affect training, by name. Written only if the run folder has no config.yaml,
                which holds all settings.
            has_failed: Whether measuring has ended already, so that the failure in the folder is this training's.
        """
        if settings is not None and not has_settings(self.folder.parent):
            text = json.dumps(plain_settings(settings), indent=1)
            write_atomically({self.folder / SETTINGS_FILE: text.encode()}, self.fix)
        if not has_failed:
            self._set_failure_aside(after_step)
        for name in (METRICS_FILE, PROBES_FILE, EVALUATIONS_FILE, ROLLOUTS_FILE):
            self._drop_lines_after(self.folder / name, after_step)

    def _set_failure_aside(self, after_step: int) -> None:
        """Rename the failure of an earlier start: measuring starts again, so the report must not say that it ended."""
        failure = self.folder / FAILURE_FILE
        if failure.is_file():
            failure.replace(failure.with_name(f"probe_error_before_step_{after_step + 1}.txt"))

    def _drop_lines_after(self, path: Path, after_step: int) -> None:
        """Rewrite a file without the lines of later steps. Only one step's lines are in memory at a time."""
        if not path.exists():
            return
        num_dropped = 0

        def kept() -> Iterator[tuple[int, str]]:
            nonlocal num_dropped
            for line, row in _parsed(path):
                if row["step"] <= after_step:
                    yield row["step"], line
                else:
                    num_dropped += 1

        by_step = groupby(kept(), key=itemgetter(0))
        texts = ("".join(line for _, line in of_step) for _, of_step in by_step)
        # One gzip member per step. Atomic: a kill or a full disk loses nothing.
        write_atomically({path: (_packed(path, text) for text in texts)}, self.fix)
        if num_dropped:
            logger.warning(f"{path}: {num_dropped} lines of steps after {after_step} are dropped")

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._append(METRICS_FILE, [_of_step(step, metrics)])

    def write_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._append(EVALUATIONS_FILE, [_of_step(step, metrics)])

    def write_estimates(self, step: int, world_size: int, probe: str, estimates: Mapping[str, Estimate]) -> None:
        rows = [
            {
                "step": step, "about_step": step if e.about_step is None else e.about_step, "world_size": world_size,
                "probe": probe, "name": name, "value": e.value, "stderr": e.stderr, "num_samples": int(e.num_samples),
                "reason": e.reason, **({"code": e.code} if e.code else {}),
                **dict(zip(("low", "high"), e.interval or (), strict=False)), **e.detail,
            }
            for name, e in estimates.items()
        ]  # fmt: skip
        self._append(PROBES_FILE, rows)

    def wants_rollouts_of(self, step: int) -> bool:
        """Return whether the sequences of this step, counted from 1, are to be written."""
        return self.rollouts_every > 0 and (step - 1) % self.rollouts_every == 0

    def write_rollouts(self, step: int, sequences: Iterable[Mapping[str, Any]]) -> None:
        self._append(ROLLOUTS_FILE, [{"step": step, **sequence} for sequence in sequences], infinite_as_text=False)

    def _append(self, name: str, rows: list[dict[str, Any]], infinite_as_text: bool = True) -> None:
        path = self.folder / name
        lines = (json.dumps(to_json(row, infinite_as_text)) + "\n" for row in rows)
        try:
            append_whole(path, _packed(path, "".join(lines)))
        except OSError as error:  # a full disk
            if self.on_write_error is None:
                raise cannot_write(path, error, self.fix) from error
            self.on_write_error(path, error)


def _of_step(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics. One that the user calls `step` does not change which step it is of."""
    return {"step": step, **metrics} | {"step": step}


def _packed(path: Path, text: str) -> bytes:
    return gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()


def _parsed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each complete line of a file as text and as parsed data.

    Raises:
        UserError: If a line cannot be read; gives its number.
    """
    fields = FIELDS.get(path.name, {"step": Field(checked_count)})
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            text = line.decode()
            row = from_json(parse_json(text))
        except ValueError as error:
            raise UserError(f"{path}, line {number} is damaged ({error}): fix or delete that line") from error
        for name, field in fields.items():
            if not isinstance(row, dict) or (name not in row and field.is_required):
                raise UserError(f"{path}, line {number} has no `{name}`: fix or delete that line")
            if name not in row:
                continue
            try:
                row[name] = field.check(row[name])
            except ValueError as error:
                raise UserError(f"{path}, line {number}: `{name}` is {error}: fix or delete that line") from error
        yield text + "\n", row


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """A field of a line: what checks and converts it, and whether a line must have it."""

    check: Callable[[Any], Any]
    is_required: bool = True


# By file, the fields of a line. Any other field of probes.jsonl is part of an estimate's `detail`.
FIELDS: dict[str, dict[str, Field]] = {
    PROBES_FILE: {
        **dict.fromkeys(("step", "about_step", "num_samples"), Field(checked_count)),
        **dict.fromkeys(("name", "reason"), Field(checked_text)),
        **dict.fromkeys(("value", "stderr"), Field(_as_it_is)),
        "code": Field(checked_text, is_required=False),
    },
    ROLLOUTS_FILE: {
        "step": Field(checked_count),
        **dict.fromkeys(("prompt_index", "length"), Field(checked_count, is_required=False)),
        **dict.fromkeys(("reward", "advantage", "logp"), Field(checked_number, is_required=False)),
    },
}


def has_records(run: Path) -> bool:
    """Return whether a folder holds the records of a run, which may be of no step yet."""
    return (run / LOGS_FOLDER / METRICS_FILE).is_file()


def has_steps(run: Path) -> bool:
    """Return whether a folder holds the records of a run with a step: a complete line, which may be damaged."""
    return has_records(run) and next(whole_lines(run / LOGS_FOLDER / METRICS_FILE), None) is not None


def logs_of(run: str | Path) -> Path:
    """Return the `logs` folder of a run. Raises UserError if metrics.jsonl is missing or has no complete line."""
    path = Path(run) / LOGS_FOLDER / METRICS_FILE
    if next(_iterate(path), None) is None:
        inside = sorted(str(file.parents[1]) for file in Path(run).glob(f"*/{LOGS_FOLDER}/{METRICS_FILE}"))
        if inside:
            more = f" and {len(inside) - MAX_NAMED_RUNS} more" if len(inside) > MAX_NAMED_RUNS else ""
            raise UserError(f"{run} holds runs, give one of them: {', '.join(inside[:MAX_NAMED_RUNS])}{more}")
        raise UserError(
            f"{path} is missing or holds no complete line: give the folder of a run that has logged at least one step, "
            "the one that holds logs/. A trainer with logging_steps=1 (trainer.logging_steps=1) logs each step"
        )
    return path.parent


def read_settings(run: str | Path) -> dict[str, Any]:
    """Return the settings in logs/settings.json, which a run without config.yaml has; {} if there are none.

    Raises:
        UserError: If the file cannot be read.
    """
    path = Path(run) / LOGS_FOLDER / SETTINGS_FILE
    if not path.is_file():
        return {}
    try:
        settings = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): fix or delete it") from error
    return without_secrets(settings) if isinstance(settings, dict) else {}


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as dictionaries, null as nan; empty if no step was logged."""
    return list(_iterate(Path(folder) / METRICS_FILE))


def read_estimates(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of probes.jsonl as dictionaries, null as nan; empty if no probe ran."""
    return list(_iterate(Path(folder) / PROBES_FILE))


def read_evaluations(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of evaluations.jsonl as dictionaries, null as nan; empty if the trainer evaluated nothing."""
    return list(_iterate(Path(folder) / EVALUATIONS_FILE))


def iterate_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of rollouts.jsonl.gz as dictionaries, null as nan; none if no sequences were recorded."""
    return _iterate(Path(folder) / ROLLOUTS_FILE)


def _iterate(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from (row for _, row in _parsed(path))
