"""Finds the checkpoints to evaluate, by step: all of a run, or those that are given."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rl_training.errors import UserError
from rl_training.records.checkpoints import steps_taken
from rl_training.records.config import is_of_attached_run
from rl_training.records.files.links import leads_out_of_its_run
from rl_training.records.folder import CONFIG_FILE, TRAINING_STATE, checkpoints_of


def find_checkpoints(run: str | None, given: list[str] | str | None) -> tuple[Path | None, dict[int, Path]]:
    """Return the run folder, or None, and the checkpoints to evaluate by step: those given, or all of the run."""
    paths = [Path(path) for path in ([given] if isinstance(given, str) else given or [])]
    if run is None:
        runs = {path.resolve().parents[1] for path in paths if path.resolve().parent.name == TRAINING_STATE}
        if not paths:
            raise UserError("nothing to evaluate: give run=RUN, the folder of a run, or 'checkpoints=[PATH,...]'")
        if len(runs) > 1:
            raise UserError(
                f"the checkpoints belong to several runs, {', '.join(map(str, runs))}: evaluate each run by itself"
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
        if not paths and not (folder / CONFIG_FILE).is_file():
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
    for path in filter(leads_out_of_its_run, paths):
        raise UserError(f"{path} is a link out of its run: name {path.resolve()} itself")
    by_step = {_step_of(path): path for path in paths}
    if len(by_step) < len(paths):
        raise UserError(f"two of {', '.join(map(str, paths))} are of the same step: evaluate them separately")
    return dict(sorted(by_step.items()))


def _step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint, from its folder's name or its trainer's state; 0 if neither has it."""
    last = checkpoint.resolve().name.rsplit("-", 1)[-1]
    if last.isdigit():
        return int(last)
    with contextlib.suppress(OSError, ValueError, KeyError):
        return steps_taken(checkpoint)
    return 0
