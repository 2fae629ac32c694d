"""Files that torch.save wrote: pickles, which could run any code when they are read. Only tensors and numbers are here.

torch's restricted reader makes nothing else. What DeepSpeed writes holds three kinds of objects of its own besides,
settings that are not needed: empty ones take their place, so that nothing of DeepSpeed is made, nor need it be there.
Random states hold arrays of NumPy, which hold numbers alone.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.errors import UserError

UnpicklingError = pickle.UnpicklingError  # of a file that names more than tensors and numbers
OF_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
OF_NUMPY: tuple[Any, ...] = (
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    np.zeros(0).__reduce__()[0],
)  # the last makes an array
STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"  # a number


class _NotNeeded:
    """Takes the place of an object whose content is not needed."""


def load_tensors(path: Path, device: str = "cpu") -> Any:
    """Return what a file holds: tensors, numbers and texts in dictionaries and lists.

    device  "meta": of tensors only the shapes

    Raises UserError, naming the file, for one that holds anything else, which could run code, or that is damaged.
    """
    stand_ins: list[Any] = [(_NotNeeded, name) for name in OF_DEEPSPEED] + [(int, STAGE)]
    try:
        with torch.serialization.safe_globals([*stand_ins, *OF_NUMPY]):
            return torch.load(path, map_location=device, weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, KeyError) as error:
        foreign = _foreign_objects(path)
        what = (
            f"objects that could run code ({', '.join(foreign)})" if foreign else f"no tensors ({_first_line(error)})"
        )
        raise UserError(f"{path} holds {what}: it is not read") from error


def _foreign_objects(path: Path) -> list[str]:
    """Return the names of what a file would have made beside tensors, numbers and what DeepSpeed writes."""
    try:
        with torch.serialization.safe_globals(list(OF_NUMPY)):
            named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # what is not even a list of names
        return []
    return sorted(set(named) - {*OF_DEEPSPEED, STAGE})


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
