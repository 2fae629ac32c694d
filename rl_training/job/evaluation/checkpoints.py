"""Finds the checkpoints that an evaluation names, each with its step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rl_training.errors import UserError
from rl_training.records.checkpoints import steps_taken
from rl_training.records.files.links import leads_out_of_its_run
from rl_training.records.folder import (
    CHECKPOINT,
    CONFIG_FILE,
    TRAINING_STATE,
    checkpoints_of,
    has_settings,
    number_at_end,
    run_of,
    step_of,
)
from rl_training.records.made_by import is_of_attached_run


def find_checkpoints(run: str | None, given: list[str] | str | None) -> tuple[Path | None, dict[int, Path]]:
    """Return the run folder, or None, and the checkpoints to evaluate by step: those given, or all of the run."""
    paths = [Path(path) for path in ([given] if isinstance(given, str) else given or [])]
    if run is None:
        runs = {run_of(path) for path in paths}
        if not paths:
            raise UserError("nothing to evaluate: give run=RUN, the folder of a run, or 'checkpoints=[PATH,...]'")
        if len(runs) > 1:
            names = ", ".join(sorted(str(run or "none at all") for run in runs))
            raise UserError(
                f"the checkpoints belong to several runs, {names}: evaluate each by itself, or name one: run=RUN"
            )
        folder = next(iter(runs), None)
    else:
        folder = Path(run)
        if not folder.is_dir():
            raise UserError(f"run={run}: there is no such folder")
        if is_of_attached_run(folder):
            raise UserError(
                f"run={run} belongs to a trainer made by a script: in Python, after `from rl_training import "
                f"evaluate`, evaluate(trainer, CHECKPOINTS, {str(run)!r}) with a new trainer of that script; on a task "
                f"of this package, 'checkpoints=[PATH,...]' data=TASK output={run}"
            )
        if not paths and not has_settings(folder):
            raise UserError(
                f"run={run} is not a run folder: it has no {CONFIG_FILE}; bare checkpoints are 'checkpoints=[PATH,...]'"
            )
        paths = paths or checkpoints_of(folder)
        if not paths:
            raise UserError(
                f"run={run} has no checkpoints ({TRAINING_STATE}/checkpoint-N): a run writes them every "
                "trainer.save_steps"
            )
    return folder, checkpoints_by_step(paths)


def checkpoints_by_step(paths: Sequence[Path]) -> dict[int, Path]:
    """Return these checkpoints by step, in the order of their steps."""
    link = next(filter(leads_out_of_its_run, paths), None)
    if link is not None:
        raise UserError(f"{link} is a link out of its run: name {link.resolve()} itself")
    by_step = {_step_of(path): path for path in paths}
    if len(by_step) < len(paths):
        raise UserError(f"two of {', '.join(map(str, paths))} are of the same step: evaluate them separately")
    return dict(sorted(by_step.items()))


def _step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint: from the name checkpoint-N, from its trainer's state, or any name."""
    folder = checkpoint.resolve()
    if CHECKPOINT.fullmatch(folder.name):
        return step_of(folder)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return steps_taken(checkpoint)
    return number_at_end(folder)
