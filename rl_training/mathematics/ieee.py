"""fp32 products as IEEE has them, whatever training has asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def ieee_fp32() -> Iterator[None]:
    """A context without TF32. By torch's new settings only: the old ones cannot be read once these were written."""
    backends: Any = torch.backends
    settings = [
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    ]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
