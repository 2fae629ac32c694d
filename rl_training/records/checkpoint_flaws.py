"""What is wrong with a checkpoint's folder: files that are missing, cut off, changed or written by another launcher."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rl_training.errors import UserError
from rl_training.records.checkpoint_states import NOT_WEIGHTS, changed_files, read_notes
from rl_training.records.files.limited import MAX_RESULT_BYTES, MAX_STATE_BYTES, read_text
from rl_training.records.files.links import leads_out_of_its_run
from rl_training.records.files.pickles import load_tensors
from rl_training.records.folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    OPTIMIZER_FILE,
    SCHEDULER_FILE,
    TRAINER_STATE_FILE,
    state_folder,
)

SHARDED_BY = ("DeepSpeed", "FSDP")  # launchers that store the optimizer in their own format
# Why a folder is no checkpoint:
NO_WEIGHTS = "it has no weights (model.safetensors or adapter_model.safetensors)"
NOT_COMPLETE = "it has no trainer_state.json, so it was not written completely"


def find_flaw(checkpoint: Path, sharded_by: str = "") -> str:
    """Return why this checkpoint folder is incomplete or damaged, or "".

    The trainer writes trainer_state.json last. A folder without it was being written when the process died.
    """
    flaw = find_weights_flaw(checkpoint)
    if flaw:
        return flaw
    try:
        launcher, optimizer = _sharded_by(checkpoint)
    except UserError as error:
        return str(error)
    if launcher != sharded_by:
        launch = f"under {launcher}" if launcher else f"without {sharded_by}"
        return f"it was written {launch}: resume with the same launch file"
    for name in (*optimizer, SCHEDULER_FILE, *_rng_files(checkpoint)):
        flaw = _flaw_of_zip(checkpoint / name)
        if flaw:
            return f"{name} is {flaw}"
    return _flaw_of_pickles([checkpoint / name for name in (*optimizer, SCHEDULER_FILE, *_rng_files(checkpoint))])


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
