"""Buffers that a forward pass in training mode changes: batch norm's averages, spectral norm's vectors, counters.

Training's next forward pass would go on from what a probe's forward pass has left in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

MAX_ENTRIES = 2**18  # of a buffer that is preserved: larger ones are masks, tables or quantized weights


@contextlib.contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers of at most MAX_ENTRIES when the context ends, if they were changed or replaced."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        if not hasattr(module, "rope_type")  # rotary.py preserves those of its tables that change
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() <= MAX_ENTRIES and not buffer.is_inference()  # which never change
    ]
    versions = [buffer._version for _, _, buffer, _ in saved]
    try:
        yield
    finally:
        for (module, name, buffer, value), version in zip(saved, versions, strict=True):
            module._buffers[name] = buffer
            if buffer._version != version:
                buffer.data.copy_(value)
