"""What is added to the trainer's checkpoint: the states of probes and buffer, who wrote it, and its checksums.

Of weights: safetensors keep none, and a changed byte in them would go unnoticed.
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
from rl_training.parallel.state_tensors import SHARD, from_tensors, tensors_by_name

logger = logging.getLogger(__name__)

PROBE_STATES = "probes.safetensors"
BUFFER_STATE = "buffer.safetensors"
NOT_WEIGHTS = ("probes", "buffer")  # how names of files of tensors begin that have none of the model's weights
CHUNK = 2**24  # bytes of a file read at once
MOST_PROCESSES = 100_000  # that a checkpoint may say it was written by: each has a file in it


class Stateful(Protocol):
    """An object whose state a checkpoint keeps: the same on all processes."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A context in which a checkpoint is written: what fails is an OSError that names the folder and the fix.

    torch and safetensors call a full disk "basic_ios::clear: iostream error", or worse.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        raise UserError(
            f"the checkpoint {folder} could not be written ({' '.join(str(error).split())}; {free / 1e6:,.1f} MB are "
            "free there): make room, then go on with resume=latest"
        ) from error


def about(checkpoint: Path) -> dict[str, str]:
    """Return what `save_probe_states` noted of a checkpoint; nothing where the trainer had no probes.

    Raises UserError, naming the file, for notes that it does not write.
    """
    path = checkpoint / PROBE_STATES
    if not path.is_file():
        return {}
    with safe_open(path, framework="pt") as file:
        notes: dict[str, str] = file.metadata() or {}
    if not _are_ours(notes):
        raise UserError(f"{path} holds other notes than a run writes, so it is damaged: choose an earlier checkpoint")
    return notes


def _are_ours(notes: Mapping[str, str]) -> bool:
    try:
        names = list(json.loads(notes["checksums"]).keys())
        num_processes = int(notes["num_processes"])
    except (ValueError, KeyError, AttributeError, RecursionError):
        return False
    return "probes" in notes and 0 < num_processes <= MOST_PROCESSES and all(Path(name).name == name for name in names)


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file, in hexadecimal digits."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def changed_files(folder: Path, checksums: Mapping[str, str]) -> list[str]:
    """Return which files in a folder are missing or do not match these checksums."""
    return [
        name
        for name, expected in checksums.items()
        if not (folder / name).is_file() or checksum(folder / name) != expected
    ]


def _file_of(rank: int) -> str:
    """Return the name of a process's file."""
    return PROBE_STATES if rank == 0 else PROBE_STATES.replace(".", f"_{rank}.")


def save_probe_states(
    states: Mapping[str, Any], checkpoint: Path, num_processes: int, rank: int = 0, run: str = ""
) -> None:
    """Write the states of probes, the number of processes and checksums into a checkpoint that has its weights.

    Call it on every process: others than the first write what they alone have, each into a file of its own.

    Args:
        states: by the probe's name.
        run: Name of the folder of the run that the checkpoint belongs to, where it does not lie in it.
    """
    tensors = {
        f"{name}/{key}": tensor.detach().clone(
            memory_format=torch.contiguous_format
        )  # copies: safetensors refuses tensors that share memory
        for name, by_path in tensors_by_name(states).items()
        for key, tensor in by_path.items()
        if rank == 0 or key.startswith(SHARD)
    }
    if rank > 0:
        checkpoint.mkdir(parents=True, exist_ok=True)  # the first process may not have yet
        save_file(tensors, checkpoint / _file_of(rank))
        return
    weights = sorted(path for path in checkpoint.glob("*.safetensors") if not path.name.startswith("probes"))
    checksums = json.dumps({path.name: checksum(path) for path in weights})
    notes = {"probes": ",".join(states), "num_processes": str(num_processes), "checksums": checksums, "run": run}
    save_file(tensors, checkpoint / PROBE_STATES, metadata=notes)


def load_probe_states(initial: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return the states in a checkpoint; warns of one that was not there when the checkpoint was written.

    Args:
        initial: the states that a training begins with, by the probe's name: the kinds of those that are read.

    Raises:
        UserError: a state is of a probe with other options.
    """
    notes = about(checkpoint)
    names = notes["probes"].split(",") if notes else []
    files = [checkpoint / _file_of(rank) for rank in range(int(notes.get("num_processes", 0)))]
    tensors = {}
    for path in filter(Path.is_file, files):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no dictionary
                # Of a shard only the entries that are asked for are read, then.
                is_shard = key.partition("/")[2].startswith(SHARD)
                tensors[key] = file.get_slice(key) if is_shard else file.get_tensor(key)
    states = dict(initial)
    for name, like in initial.items():
        if name not in names:
            logger.warning(f"{checkpoint} holds no state of probe {name!r}: it starts afresh")
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
    """Give the buffer its state back. ValueError when the checkpoint has none."""
    if not (checkpoint / BUFFER_STATE).is_file():
        raise UserError(
            f"{checkpoint} has no {BUFFER_STATE}, so it was not written with buffer=filtered: resume with "
            "buffer=plain, or start a new run from its weights (model=hub model.name=CHECKPOINT)"
        )
    buffer.load_state_dict(load_file(checkpoint / BUFFER_STATE))
