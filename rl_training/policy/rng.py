"""Random streams: a measurement may draw random numbers without changing those of training."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore the RNG states of Python, NumPy and torch when the context ends."""
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_torch(*seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device` only; torch.manual_seed would seed every device's."""
    number = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)
