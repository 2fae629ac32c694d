"""The files of a kernel: each is written under another name and moved, so that no file is ever incomplete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_training.records.atomic_write import write_atomically

KERNEL_FILE, UPDATE_FILE, PLAN_FILE = "kernel.safetensors", "update.safetensors", "plan.json"


def block_file(folder: Path, number: int) -> Path:
    return folder / f"block-{number:05d}.safetensors"


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes the file under another name and moves it, so that it is never incomplete."""
    scratch = path.with_suffix(".tmp")
    try:
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, scratch, dict(metadata or {}))
    except Exception as error:  # safetensors has errors of its own
        raise OSError(
            f"{path} cannot be written ({error}): make room; a finished block is not calculated again"
        ) from error
    scratch.replace(path)


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Claims the folder for this kernel. Raises ValueError when it belongs to another one."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / PLAN_FILE
    if plan.is_file():
        other = json.loads(plan.read_text(encoding="utf-8"))
        different = [key for key in identity if other.get(key) != identity[key]]
        if different:
            raise ValueError(
                f"{folder} holds a kernel with other {', '.join(different)}: name another folder, or remove this one"
            )
        return
    write_atomically({plan: json.dumps(identity).encode()})


@dataclass(frozen=True)
class Kernel:
    """A finished kernel, as its file has it."""

    tensors: Mapping[str, Tensor]
    about: Mapping[str, str]

    @property
    def scale(self) -> float:
        """c /(N_U L): what turns K(i, j) A_j into a change of log π(i)."""
        return float(self.about["clip_coefficient"]) / (self.tensors["kernel"].shape[1] * int(self.about["max_length"]))


def load_kernel(folder: Path) -> Kernel:
    """Returns the kernel in this folder. Raises ValueError when it is not finished."""
    path = folder / KERNEL_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {KERNEL_FILE}: run rl-training analyze kernel.enabled=true")
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata())
        return Kernel(load_file(path), about)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and run rl-training analyze again") from error
