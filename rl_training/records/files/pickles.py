"""Read files of torch.save without running code. They are pickles; only tensors and numbers are accepted.

torch's restricted reader creates nothing else. DeepSpeed's files also hold three kinds of its own objects with settings
that are not needed: empty stand-ins replace them, so DeepSpeed is neither run nor required. Random states hold NumPy
arrays, which contain only numbers.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.errors import UserError

UnpicklingError = pickle.UnpicklingError  # raised for a file that names more than tensors and numbers
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
)  # the last is the function that builds an array
STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"  # a number; read as int


class _NotNeeded:
    """Replaces an object whose content is not needed."""


def load_tensors(path: Path, device: str = "cpu") -> Any:
    """Return the content of a file: tensors, numbers and texts in dictionaries and lists.

    Args:
        device: Where tensors go; "meta" reads only their shapes.

    Raises:
        UserError: If the file is damaged, or holds anything else, which could run code; names the file.
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
    """Return the names of the objects in a file that are not tensors, numbers or what DeepSpeed writes."""
    try:
        with torch.serialization.safe_globals(list(OF_NUMPY)):
            objects = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # damaged: it has no readable list of names
        return []
    return sorted(set(objects) - {*OF_DEEPSPEED, STAGE})


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
