"""The files in logs/, written line by line (writer.py), and their readers.

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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.records.files.limited import read_text
from rl_training.records.files.masking import without_secrets
from rl_training.records.files.unpack import whole_lines
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.json_values import (
    checked_count,
    checked_number,
    checked_text,
    from_json,
    parse_json,
)

METRICS_FILE = "metrics.jsonl"
SETTINGS_FILE = "settings.json"  # of a training without config.yaml
PROBES_FILE = "probes.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl.gz"
MAX_NAMED_RUNS = 5  # that an error lists


def _unchecked(value: Any) -> Any:
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
        **dict.fromkeys(("value", "stderr"), Field(_unchecked)),
        "code": Field(checked_text, is_required=False),
    },
    ROLLOUTS_FILE: {
        "step": Field(checked_count),
        **dict.fromkeys(("prompt_index", "length"), Field(checked_count, is_required=False)),
        **dict.fromkeys(("reward", "advantage", "logp"), Field(checked_number, is_required=False)),
    },
}


def parse_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each complete line of a file as text and as parsed data.

    Raises:
        UserError: If a line cannot be read; gives its number.
    """
    fields = FIELDS.get(path.name, {"step": Field(checked_count)})
    for number, line in enumerate(whole_lines(path), start=1):
        where = f"{path}, line {number}"
        try:
            text = line.decode()
            row = from_json(parse_json(text))
        except ValueError as error:
            raise UserError(f"{where} is damaged ({error}): fix or delete that line") from error
        yield text + "\n", _checked_row(row, fields, where)


def _checked_row(row: Any, fields: Mapping[str, Field], where: str) -> dict[str, Any]:
    """Return a parsed line with its fields checked and converted. Raises UserError if it lacks one, or one is wrong."""
    for name, field in fields.items():
        if not isinstance(row, dict) or (name not in row and field.is_required):
            raise UserError(f"{where} has no `{name}`: fix or delete that line")
        if name not in row:
            continue
        try:
            row[name] = field.check(row[name])
        except ValueError as error:
            raise UserError(f"{where}: `{name}` is {error}: fix or delete that line") from error
    checked: dict[str, Any] = row
    return checked


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
        runs = sorted(str(file.parents[1]) for file in Path(run).glob(f"*/{LOGS_FOLDER}/{METRICS_FILE}"))
        if runs:
            remainder = f" and {len(runs) - MAX_NAMED_RUNS} more" if len(runs) > MAX_NAMED_RUNS else ""
            raise UserError(f"{run} holds runs, give one of them: {', '.join(runs[:MAX_NAMED_RUNS])}{remainder}")
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
        yield from (row for _, row in parse_lines(path))
