"""The writer of the files in logs/, which jsonl.py describes and reads."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rl_training.records.failure import FAILURE_FILE
from rl_training.records.files.append import append_whole
from rl_training.records.files.atomic_write import cannot_write, write_atomically
from rl_training.records.folder import has_settings
from rl_training.records.json_values import plain_settings, to_json
from rl_training.records.jsonl import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    PROBES_FILE,
    ROLLOUTS_FILE,
    SETTINGS_FILE,
    parse_lines,
)
from rl_training.statistics.estimate import Estimate

logger = logging.getLogger(__name__)

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
        self.folder = Path(folder).absolute()  # a reward function may change the working directory
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

        def earlier_lines() -> Iterator[tuple[int, str]]:
            nonlocal num_dropped
            for line, row in parse_lines(path):
                if row["step"] <= after_step:
                    yield row["step"], line
                else:
                    num_dropped += 1

        by_step = groupby(earlier_lines(), key=itemgetter(0))
        texts = ("".join(line for _, line in of_step) for _, of_step in by_step)
        # One gzip member per step. Atomic: a kill or a full disk loses nothing.
        write_atomically({path: (_packed(path, text) for text in texts)}, self.fix)
        if num_dropped:
            logger.warning(f"{path}: {num_dropped} lines of steps after {after_step} are dropped")

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._append(METRICS_FILE, [_line_of_metrics(step, metrics)])

    def write_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._append(EVALUATIONS_FILE, [_line_of_metrics(step, metrics)])

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


def _line_of_metrics(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics. One that the user calls `step` does not change which step it is of."""
    return {"step": step, **metrics} | {"step": step}


def _packed(path: Path, text: str) -> bytes:
    return gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()
