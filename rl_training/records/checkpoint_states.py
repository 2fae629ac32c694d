"""Additions to the trainer's checkpoint: states of probes and buffer, number of processes, checksums.

safetensors has no checksums, so a changed byte in the weights or in the buffer would go unnoticed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_training.errors import UserError
from rl_training.parallel.state_tensors import SHARD_PREFIX, from_tensors, tensors_by_name
from rl_training.records.files.damaged import naming_the_file

logger = logging.getLogger(__name__)

PROBE_STATES = "probes.safetensors"
BUFFER_STATE = "buffer.safetensors"
NOT_WEIGHTS = ("probes", "buffer")  # prefixes of safetensors files that are not the model's weights
CHUNK = 2**24  # bytes read at once
MAX_PROCESSES = 100_000  # a checkpoint that claims more is damaged, since each has a file in it


class Stateful(Protocol):
    """An object with a state to keep in checkpoints. The state is the same on all ranks."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn any failure to write a checkpoint inside this context into a UserError that names the folder and the fix.

    torch and safetensors report a full disk as "basic_ios::clear: iostream error", or worse.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        raise UserError(
            f"the checkpoint {folder} could not be written ({' '.join(str(error).split())}; {free / 1e6:,.1f} MB are "
            "free there): make room, then resume from the checkpoint before it"
        ) from error


def read_notes(checkpoint: Path) -> dict[str, str]:
    """Return the notes that `save_probe_states` left in a checkpoint; {} if the trainer had no probes.

    Raises:
        UserError: If the notes are not of the form that it writes; names the file.
    """
    path = checkpoint / PROBE_STATES
    if not path.is_file():
        return {}
    fix = "choose an earlier checkpoint"
    with (
        naming_the_file(path, "is not a whole safetensors file, so it is damaged", fix, (OSError, SafetensorError)),
        safe_open(path, framework="pt") as file,
    ):
        notes: dict[str, str] = file.metadata() or {}
    if not _are_ours(notes):
        raise UserError(f"{path} does not hold the notes of a run, so it is damaged: {fix}")
    return notes


def _are_ours(notes: Mapping[str, str]) -> bool:
    try:
        names = list(json.loads(notes["checksums"]).keys())
        num_processes = int(notes["num_processes"])
    except (ValueError, KeyError, AttributeError, RecursionError):
        return False
    return "probes" in notes and 0 < num_processes <= MAX_PROCESSES and all(Path(name).name == name for name in names)


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file, in hexadecimal digits."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def changed_files(folder: Path, checksums: Mapping[str, str]) -> list[str]:
    """Return the names of the files in a folder that are missing or do not match these checksums."""
    return [
        name
        for name, expected in checksums.items()
        if not (folder / name).is_file() or checksum(folder / name) != expected
    ]


def _file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return PROBE_STATES if rank == 0 else PROBE_STATES.replace(".", f"_{rank}.")


def save_probe_states(
    states: Mapping[str, Any], checkpoint: Path, num_processes: int, rank: int = 0, run: str = ""
) -> None:
    """Write the states of probes, the number of processes and checksums into a checkpoint that already has its weights.

    Call it on every rank. Ranks above 0 write only their own shards, each into its own file.

    Args:
        states: States by the probe's name.
        run: Id of the training whose records lie outside of the checkpoint's folder, if they do.
    """
    tensors = {
        f"{name}/{key}": tensor.detach().clone(
            memory_format=torch.contiguous_format
        )  # copies: safetensors refuses tensors that share memory
        for name, by_path in tensors_by_name(states).items()
        for key, tensor in by_path.items()
        if rank == 0 or key.startswith(SHARD_PREFIX)
    }
    if rank > 0:
        checkpoint.mkdir(parents=True, exist_ok=True)  # the first process may not have yet
        save_file(tensors, checkpoint / _file_of(rank))
        return
    # The buffer's state too, which the trainer has written by now.
    weights = sorted(path for path in checkpoint.glob("*.safetensors") if not path.name.startswith("probes"))
    checksums = json.dumps({path.name: checksum(path) for path in weights})
    notes = {"probes": ",".join(states), "num_processes": str(num_processes), "checksums": checksums, "run": run}
    save_file(tensors, checkpoint / PROBE_STATES, metadata=notes)


def load_probe_states(initial: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return the probe states in a checkpoint. A probe that has none in it keeps its initial state, with a warning.

    Args:
        initial: Initial states by the probe's name. States are loaded into the same types.

    Raises:
        UserError: If a state was written by a probe with other options.
    """
    notes = read_notes(checkpoint)
    names = notes["probes"].split(",") if notes else []
    files = [checkpoint / _file_of(rank) for rank in range(int(notes.get("num_processes", 0)))]
    tensors = {}
    for path in filter(Path.is_file, files):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, it is not a dictionary
                # A slice of a shard is lazy: only the entries that are used are read.
                is_shard = key.partition("/")[2].startswith(SHARD_PREFIX)
                tensors[key] = file.get_slice(key) if is_shard else file.get_tensor(key)
    states = dict(initial)
    if missing := [name for name in initial if name not in names]:
        logger.warning(f"{checkpoint} holds no state of these, which begin anew: {', '.join(missing)}")
    for name, like in initial.items():
        if name in missing:
            continue
        prefix = f"{name}/"
        try:
            states[name] = from_tensors(
                like, {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            )
        except ValueError as error:
            raise UserError(
                f"{checkpoint / PROBE_STATES}: the state of probe {name!r} does not fit this one ({error}): give the "
                "options that wrote it, or leave the probe out"
            ) from error
    return states


def save_buffer_state(buffer: Stateful, checkpoint: Path) -> None:
    """Write the buffer's state into the checkpoint folder."""
    save_file(buffer.state_dict(), checkpoint / BUFFER_STATE)


def load_buffer_state(buffer: Stateful, checkpoint: Path) -> None:
    """Restore the buffer's state. Raises UserError if the checkpoint has none."""
    if not (checkpoint / BUFFER_STATE).is_file():
        raise UserError(
            f"{checkpoint} has no {BUFFER_STATE}, so it was not written with a FilteredBuffer: resume without "
            "a buffer, or start a new run from its weights (on the command line: buffer=plain, or model=hub "
            "model.name=CHECKPOINT)"
        )
    buffer.load_state_dict(load_file(checkpoint / BUFFER_STATE))
