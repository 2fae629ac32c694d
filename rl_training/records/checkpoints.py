"""Find the checkpoint to resume from or to analyze, among those that checkpoint_flaws.py finds complete."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.errors import UserError
from rl_training.records.checkpoint_flaws import find_flaw, find_weights_flaw
from rl_training.records.files.limited import MAX_STATE_BYTES, read_text
from rl_training.records.files.printable import printable
from rl_training.records.folder import (
    LOGS_FOLDER,
    TRAINER_STATE_FILE,
    TRAINING_STATE,
    checkpoints_in,
    checkpoints_of,
    number_at_end,
    state_folder,
    step_of,
)
from rl_training.records.jsonl import METRICS_FILE

logger = logging.getLogger(__name__)

SET_ASIDE = "set_aside"  # subfolder of training_state for checkpoints of steps that are taken again


def find_checkpoint(
    resume: str, run_dir: Path, sharded_by: str = "", *, setting: str = "resume", or_else: str = ""
) -> Path:
    """Return the checkpoint folder that `resume` names. Incomplete checkpoints are skipped with a warning.

    Args:
        resume: A checkpoint folder, a run folder (its newest complete checkpoint), or "latest": the newest complete
            checkpoint of `run_dir` or, if that run does not exist yet, of the newest run next to it that has one.
        run_dir: Folder of this run.
        sharded_by: Which of checkpoint_flaws.SHARDED_BY launched this run, or "".
        setting: Name of the setting that `resume` is the value of, for errors.
        or_else: What the user can do instead, for the error if there is none.

    Raises:
        UserError: If there is none; says where it looked.
    """
    request = _Request(setting, resume, lambda checkpoint: find_flaw(checkpoint, sharded_by), or_else)
    if resume == "latest":
        return request.newest_in(run_dir if (run_dir / TRAINING_STATE).is_dir() else run_dir.parent)
    return request.at(Path(resume))


def resolve_checkpoints(choice: str | Sequence[str], runs: Path) -> list[Path]:
    """Return the checkpoint folders with undamaged weights that are meant, in the given order or sorted by step.

    Args:
        choice: "latest": the newest checkpoint of the newest run in `runs`; "all": all of that run; a run folder: its
            newest; a folder of checkpoints, such as RUN/training_state: all in it; a checkpoint folder; or a list of
            these.
        runs: A folder of runs.

    Raises:
        UserError: If one is missing or damaged; says where it looked.
    """
    if not isinstance(choice, str):
        return [path for place in choice for path in resolve_checkpoints(str(place), runs)]
    request = _Request("checkpoint", choice, find_weights_flaw)
    if choice == "all":
        return request.all_in(_with_newest_first(runs), runs)
    if choice == "latest":
        return [request.newest_in(runs)]
    path = Path(choice)
    return request.all_in([path], path) if checkpoints_in(path) else [request.at(path)]


@dataclass(frozen=True)
class _Request:
    """A setting whose value names a checkpoint, and what a checkpoint must be for it."""

    setting: str
    value: str
    flaw_of: Callable[[Path], str]  # returns what is wrong with a checkpoint, or ""
    or_else: str = ""  # what the user can do instead, for the error if there is no checkpoint

    def at(self, path: Path) -> Path:
        """Return the checkpoint at a path: that folder, or the newest one of the run or of the checkpoints in it.

        Raises:
            UserError: If there is none, or the folder named has a flaw.
        """
        if (path / TRAINING_STATE).is_dir() or checkpoints_in(path):
            return self._newest([path], path)
        if not path.is_dir():
            raise UserError(
                f"{self.setting}={self.value}: there is no such folder; give a run or a checkpoint-N folder"
            )
        if flaw := self.flaw_of(path):
            raise UserError(
                f"{self.setting}={self.value} cannot be used: {flaw}. Choose an earlier checkpoint-N folder"
            )
        return path

    def newest_in(self, runs: Path) -> Path:
        """Return the newest checkpoint of a run, or of the run in a folder of runs that has taken a step last.

        Raises:
            UserError: If there is none.
        """
        return self._newest(_with_newest_first(runs), runs)

    def all_in(self, folders: Sequence[Path], searched: Path) -> list[Path]:
        """Return the checkpoints without a flaw, by step, of the first of these folders that has one.

        Args:
            folders: Runs, or folders of checkpoints.
            searched: Where they lie, for the error.

        Raises:
            UserError: If there is none.
        """
        for folder in folders:
            if checkpoints := list(_flawless(_checkpoints(folder), self.flaw_of)):
                return checkpoints
        raise self._none_in(searched)

    def _newest(self, folders: Sequence[Path], searched: Path) -> Path:
        """Return the newest checkpoint without a flaw of the first of these folders that has one."""
        newest_first = (path for folder in folders for path in _checkpoints(folder)[::-1])
        newest = next(_flawless(newest_first, self.flaw_of), None)
        if newest is None:
            raise self._none_in(searched)
        return newest

    def _none_in(self, searched: Path) -> UserError:
        instead = f", or {self.or_else}" if self.or_else else ""
        return UserError(
            f"{self.setting}={self.value}: no complete checkpoint in {searched}; give {self.setting}=PATH{instead}"
        )


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, or those in a folder of checkpoints, complete or not, by step."""
    return checkpoints_of(folder) or checkpoints_in(folder)


def _with_newest_first(runs: Path) -> list[Path]:
    """Return the run at a path, or the runs in a folder of runs, the one that has taken a step last first."""
    if checkpoints_of(runs):
        return [runs]
    runs_in_folder = (path.parent for path in runs.glob(f"*/{TRAINING_STATE}"))
    return sorted(runs_in_folder, key=_last_step_at, reverse=True)


def newest_checkpoint(run: Path, sharded_by: str = "") -> Path | None:
    """Return the newest complete checkpoint of a run, or None. Incomplete ones are skipped with a warning."""
    return next(_flawless(checkpoints_of(run)[::-1], lambda path: find_flaw(path, sharded_by)), None)


def _flawless(checkpoints: Iterable[Path], flaw_of: Callable[[Path], str]) -> Iterator[Path]:
    """Yield the checkpoints without a flaw; skip the others with a warning."""
    for checkpoint in checkpoints:
        flaw = flaw_of(checkpoint)
        if flaw:
            logger.warning(printable(f"skipping {checkpoint}: {flaw}"))
        else:
            yield checkpoint


def _last_step_at(run: Path) -> float:
    """Return the file system's time of a run's last step, in seconds; 0 if it has taken none."""
    files = [run / LOGS_FOLDER / METRICS_FILE, *(path / TRAINER_STATE_FILE for path in checkpoints_of(run))]
    return max((path.stat().st_mtime for path in files if path.is_file()), default=0.0)


def steps_taken(checkpoint: Path) -> int:
    """Return the number of optimizer steps behind a complete checkpoint, whatever its folder is called.

    A folder of weights alone has no trainer_state.json. The number at the end of its parent's name counts, or 0.
    """
    state = state_folder(checkpoint)
    if state != checkpoint and not (state / TRAINER_STATE_FILE).is_file():
        return number_at_end(state.resolve())
    return int(json.loads(read_text(state / TRAINER_STATE_FILE, MAX_STATE_BYTES))["global_step"])


def set_aside_later(run: Path, after_step: int) -> None:
    """Move later checkpoints away, because the run takes those steps again and `latest` might pick one of them."""
    side_folder = run / TRAINING_STATE / SET_ASIDE
    for later in checkpoints_of(run):
        if step_of(later) > after_step:
            side_folder.mkdir(exist_ok=True)
            shutil.rmtree(side_folder / later.name, ignore_errors=True)  # left from an earlier kill and resume
            later.rename(side_folder / later.name)
            logger.warning(f"continuing from step {after_step}: {later.name} is now in {side_folder}")
