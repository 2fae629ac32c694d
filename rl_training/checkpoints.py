"""Checkpoints: finding the one to resume from, refusing a half-written one, and the probes' state inside of it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from rl_training.probes.base import Probe

logger = logging.get_logger(__name__)

TRAINING_STATE = "training_state"  # folder of a run that holds checkpoint-N folders
PROBE_STATES = "probes.safetensors"


def find_checkpoint(resume: str, run_dir: Path, deepspeed: bool = False) -> Path:
    """Returns the checkpoint folder that `resume` names.

    resume   "latest": the newest complete checkpoint of `run_dir`, or, when that run does not exist yet, of the newest
             run beside it that has one. Otherwise a checkpoint folder, or a run folder (its newest complete one).

    deepspeed  whether this run is DeepSpeed's, whose checkpoints hold the optimizer in another form

    Raises ValueError when there is none, saying what was looked at; incomplete ones are skipped with a warning.
    """
    if resume != "latest":
        path = Path(resume)
        if (path / TRAINING_STATE).is_dir():
            return _newest([path], f"resume={resume}", deepspeed)
        if not path.is_dir():
            raise ValueError(f"resume={resume}: there is no such folder; give a checkpoint-N folder or a run folder")
        flaw = what_is_wrong_with(path, deepspeed)
        if flaw:
            raise ValueError(f"resume={resume} cannot be resumed from: {flaw}. Choose an earlier checkpoint-N folder")
        return path
    if (run_dir / TRAINING_STATE).is_dir():
        return _newest([run_dir], f"resume=latest in {run_dir}", deepspeed)
    runs = sorted(run_dir.parent.glob("run_*"), reverse=True)  # named by date and time
    return _newest(runs, f"resume=latest in {run_dir.parent}", deepspeed)


def _newest(runs: list[Path], asked: str, deepspeed: bool) -> Path:
    for run in runs:
        checkpoints = [p for p in (run / TRAINING_STATE).glob("checkpoint-*") if p.name.split("-")[1].isdigit()]
        for checkpoint in sorted(checkpoints, key=lambda p: int(p.name.split("-")[1]), reverse=True):
            flaw = what_is_wrong_with(checkpoint, deepspeed)
            if not flaw:
                return checkpoint
            logger.warning(f"skipping {checkpoint}: {flaw}")
    raise ValueError(f"{asked}: no complete checkpoint there; give resume=PATH, or start a new run without resume")


def what_is_wrong_with(checkpoint: Path, deepspeed: bool = False) -> str:
    """Returns why this checkpoint folder is incomplete or damaged, or "" if it is neither.

    The trainer writes trainer_state.json last, so a folder without it was being written when the process died.
    """
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it has no trainer_state.json, so writing it was not finished"
    except ValueError:
        return "its trainer_state.json is damaged"
    weights = sorted(checkpoint.glob("*.safetensors"))
    if not any(path.name != PROBE_STATES for path in weights):
        return "it has no weights (model.safetensors or adapter_model.safetensors)"
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            return f"{path.name} is damaged ({error})"
    tag = checkpoint / "latest"  # where DeepSpeed says in which folder its engine's state is
    if tag.exists() != deepspeed:
        return f"it was written {'without' if deepspeed else 'under'} DeepSpeed: resume with the same launch file"
    states = ["optimizer.pt"]
    if deepspeed:
        folder = tag.read_text(encoding="utf-8").strip()
        states = [f"{folder}/{path.name}" for path in sorted((checkpoint / folder).glob("*.pt"))] or [folder]
    for name in (*states, "scheduler.pt"):
        if not zipfile.is_zipfile(checkpoint / name):
            return f"{name} is missing or damaged"
    return ""


def save_probe_states(probes: Sequence[Probe], checkpoint: Path) -> None:
    """Writes the probes' states into the checkpoint folder, with the names of the probes that were there."""
    tensors = {
        f"{probe.name}/{key}": tensor.detach().clone()  # safetensors refuses tensors that share memory
        for probe in probes
        for key, tensor in probe.state_dict().items()
    }
    save_file(tensors, checkpoint / PROBE_STATES, metadata={"probes": ",".join(probe.name for probe in probes)})


def load_probe_states(probes: Sequence[Probe], checkpoint: Path) -> None:
    """Gives each probe its state back; warns of one that was not there when the checkpoint was written."""
    names: list[str] = []
    tensors = {}
    if (checkpoint / PROBE_STATES).is_file():
        with safe_open(checkpoint / PROBE_STATES, framework="pt") as file:
            names = file.metadata()["probes"].split(",")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is no dictionary
    for probe in probes:
        if probe.name in names:
            prefix = f"{probe.name}/"
            probe.load_state_dict({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})
        else:
            logger.warning(f"{checkpoint} holds no state of probe {probe.name!r}: it starts afresh")
