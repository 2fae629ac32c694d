"""Checkpoints: find the one to resume from or to analyze, and refuse incomplete or damaged ones."""

from __future__ import annotations

import json
import logging
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rl_training.errors import UserError
from rl_training.records.checkpoint_states import NOT_WEIGHTS, changed_files, read_notes
from rl_training.records.files.limited import MAX_RESULT_BYTES, MAX_STATE_BYTES, read_text
from rl_training.records.files.links import leads_out_of_its_run
from rl_training.records.files.pickles import load_tensors
from rl_training.records.files.printable import printable
from rl_training.records.folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    LOGS_FOLDER,
    OPTIMIZER_FILE,
    SCHEDULER_FILE,
    TRAINER_STATE_FILE,
    TRAINING_STATE,
    checkpoints_in,
    checkpoints_of,
    number_at_end,
    step_of,
)
from rl_training.records.jsonl import METRICS_FILE

logger = logging.getLogger(__name__)

SET_ASIDE = "set_aside"  # subfolder of training_state for checkpoints of steps that are taken again
WEIGHTS_ALONE = "model"  # a folder of weights alone, as some other trainers write it; its parent holds the optimizer
SHARDED_BY = ("DeepSpeed", "FSDP")  # launchers that store the optimizer in their own format

# Why a folder is no checkpoint:
NO_WEIGHTS = "it has no weights (model.safetensors or adapter_model.safetensors)"
NOT_COMPLETE = "it has no trainer_state.json, so it was not written completely"


def find_checkpoint(
    resume: str, run_dir: Path, sharded_by: str = "", *, setting: str = "resume", or_else: str = ""
) -> Path:
    """Return the checkpoint folder that `resume` names. Incomplete checkpoints are skipped with a warning.

    Args:
        resume: A checkpoint folder, a run folder (its newest complete checkpoint), or "latest": the newest complete
            checkpoint of `run_dir` or, if that run does not exist yet, of the newest run next to it that has one.
        run_dir: Folder of this run.
        sharded_by: Which of SHARDED_BY launched this run, or "".
        setting: Name of the setting that `resume` is the value of, for errors.
        or_else: What the user can do instead, for the error if there is none.

    Raises:
        UserError: If there is none; says where it looked.
    """
    wanted = _Wanted(setting, resume, lambda checkpoint: find_flaw(checkpoint, sharded_by), or_else)
    if resume == "latest":
        return wanted.newest_in(run_dir if (run_dir / TRAINING_STATE).is_dir() else run_dir.parent)
    return wanted.at(Path(resume))


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
    wanted = _Wanted("checkpoint", choice, find_weights_flaw)
    if choice == "all":
        return wanted.all_in(_with_newest_first(runs), runs)
    if choice == "latest":
        return [wanted.newest_in(runs)]
    path = Path(choice)
    return wanted.all_in([path], path) if checkpoints_in(path) else [wanted.at(path)]


@dataclass(frozen=True)
class _Wanted:
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
            if found := list(_flawless(_checkpoints(folder), self.flaw_of)):
                return found
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
    inside = (path.parent for path in runs.glob(f"*/{TRAINING_STATE}"))
    return sorted(inside, key=_last_step_at, reverse=True)


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
    written = [run / LOGS_FOLDER / METRICS_FILE, *(path / TRAINER_STATE_FILE for path in checkpoints_of(run))]
    return max((path.stat().st_mtime for path in written if path.is_file()), default=0.0)


def steps_taken(checkpoint: Path) -> int:
    """Return the number of optimizer steps behind a complete checkpoint, whatever its folder is called.

    A folder of weights alone has no trainer_state.json. The number at the end of its parent's name counts, or 0.
    """
    state = state_folder(checkpoint)
    if state != checkpoint and not (state / TRAINER_STATE_FILE).is_file():
        return number_at_end(state.resolve())
    return int(json.loads(read_text(state / TRAINER_STATE_FILE, MAX_STATE_BYTES))["global_step"])


def state_folder(checkpoint: Path) -> Path:
    """Return the folder that holds optimizer and scheduler: the checkpoint, or the folder around weights in `model`."""
    alone = checkpoint.resolve().name == WEIGHTS_ALONE and not (checkpoint / TRAINER_STATE_FILE).is_file()
    return checkpoint.resolve().parent if alone else checkpoint


def checkpoint_name(checkpoint: Path) -> str:
    """Return the name of a checkpoint's folder; of weights in `model`, that of the folder around it.

    >>> checkpoint_name(Path("runs/state/checkpoint-20")), checkpoint_name(Path("trained/global_step_20/model"))
    ('checkpoint-20', 'global_step_20')
    """
    return state_folder(checkpoint).absolute().name


def set_aside_later(run: Path, after_step: int) -> None:
    """Move later checkpoints away, because the run takes those steps again and `latest` might pick one of them."""
    aside = run / TRAINING_STATE / SET_ASIDE
    for later in checkpoints_of(run):
        if step_of(later) > after_step:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / later.name, ignore_errors=True)  # left from an earlier kill and resume
            later.rename(aside / later.name)
            logger.warning(f"continuing from step {after_step}: {later.name} is now in {aside}")


def find_flaw(checkpoint: Path, sharded_by: str = "") -> str:
    """Return why this checkpoint folder is incomplete or damaged, or "".

    The trainer writes trainer_state.json last. A folder without it was being written when the process died.
    """
    flaw = find_weights_flaw(checkpoint)
    if flaw:
        return flaw
    try:
        written, optimizer = _sharded_by(checkpoint)
    except UserError as error:
        return str(error)
    if written != sharded_by:
        launch = f"under {written}" if written else f"without {sharded_by}"
        return f"it was written {launch}: resume with the same launch file"
    for name in (*optimizer, SCHEDULER_FILE, *_rng_files(checkpoint)):
        flaw = _flaw_of_zip(checkpoint / name)
        if flaw:
            return f"{name} is {flaw}"
    return _flaw_of_pickles([checkpoint / name for name in (*optimizer, SCHEDULER_FILE, *_rng_files(checkpoint))])


def _flaw_of_pickles(paths: Iterable[Path]) -> str:
    """Return why these files hold more than tensors, or "". DeepSpeed unpickles its own files, which could run code."""
    try:
        for path in paths:
            load_tensors(path, "meta")
    except UserError as error:
        return str(error)
    return ""


def _sharded_by(checkpoint: Path) -> tuple[str, list[str]]:
    """Return which of SHARDED_BY wrote this checkpoint ("" for neither), and the names of its optimizer files."""
    if (checkpoint / "latest").exists():  # DeepSpeed writes the name of the folder of its engine's state here
        folder = deepspeed_folder(checkpoint)
        return "DeepSpeed", [f"{folder}/{path.name}" for path in sorted((checkpoint / folder).glob("*.pt"))] or [folder]
    if any(checkpoint.glob("pytorch_model_fsdp*")):
        return "FSDP", ["optimizer.bin", "pytorch_model_fsdp.bin"]
    return "", [OPTIMIZER_FILE]


def deepspeed_folder(checkpoint: Path) -> str:
    """Return the name of the folder with the state of DeepSpeed's engine. Raises UserError if `latest` has no name."""
    name = read_text(checkpoint / "latest").strip()
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"{checkpoint / 'latest'} does not name a folder of this checkpoint: it is damaged")
    return name


def find_weights_flaw(checkpoint: Path) -> str:
    """Return why a folder's weights are damaged, or what is missing next to a folder of weights alone; otherwise ""."""
    if leads_out_of_its_run(checkpoint):
        return f"it is a link out of its run, to {checkpoint.resolve()}"
    if state_folder(checkpoint) != checkpoint:
        needed = [state_folder(checkpoint) / OPTIMIZER_FILE]
        if (checkpoint / ADAPTER_CONFIG_FILE).is_file() or not (checkpoint / "config.json").is_file():
            needed = [checkpoint / ADAPTER_CONFIG_FILE, checkpoint / ADAPTER_WEIGHTS_FILE, *needed]
        missing = [str(path) for path in needed if not path.is_file()]
        return f"it lacks {' and '.join(missing)}" if missing else _find_tensor_flaw(checkpoint)
    try:
        state = json.loads(read_text(checkpoint / TRAINER_STATE_FILE, MAX_STATE_BYTES))
        if type(state["global_step"]) is not int:
            return "its trainer_state.json is damaged"
    except FileNotFoundError:
        return NOT_COMPLETE
    except UserError as error:
        return str(error)
    except (ValueError, TypeError, KeyError, RecursionError):
        return "its trainer_state.json is damaged"
    return _find_tensor_flaw(checkpoint)


def _find_tensor_flaw(checkpoint: Path) -> str:
    weights = sorted(checkpoint.glob("*.safetensors"))
    if all(path.name.startswith(NOT_WEIGHTS) for path in weights):
        return NO_WEIGHTS
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass  # opening checks the header, and the file's length against it
        except SafetensorError as error:
            return f"{path.name} is damaged ({error})"
    for index in sorted(checkpoint.glob("*.safetensors.index.json")):
        try:
            shards = set(json.loads(read_text(index, MAX_RESULT_BYTES))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return f"{index.name} is damaged"
        missing = sorted(shards - {path.name for path in weights})
        if missing:
            return f"{', '.join(missing)} of {index.name} is missing"
    try:
        changed = changed_files(checkpoint, json.loads(read_notes(checkpoint).get("checksums", "{}")))
    except UserError as error:
        return str(error)
    return f"{', '.join(changed)} is damaged (its checksum has changed since it was written)" if changed else ""


def _flaw_of_zip(path: Path) -> str:
    """Return what is wrong with a file of torch.save, or "". It is a zip archive with a checksum for each member."""
    if not zipfile.is_zipfile(path):
        return "missing or damaged"
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError) as error:
        return f"damaged ({error})"
    return "" if member is None else f"damaged (checksum of {member})"


def written_by(checkpoint: Path) -> int:
    """Return the number of processes that wrote this complete checkpoint."""
    return len(_rng_files(checkpoint))


def _rng_files(checkpoint: Path) -> list[str]:
    """Return the names of the files with random states, one for each process that wrote the checkpoint."""
    notes = read_notes(checkpoint)
    if "num_processes" not in notes:  # from a trainer without probes: the number is unknown
        return sorted(path.name for path in checkpoint.glob("rng_state*.pth")) or ["rng_state.pth"]
    num_processes = int(notes["num_processes"])
    return ["rng_state.pth"] if num_processes == 1 else [f"rng_state_{rank}.pth" for rank in range(num_processes)]
