"""Buffers that a forward pass in training mode changes: batch norm's averages, spectral norm's vectors, counters.

Training's next forward pass would go on from what a probe's forward pass has left in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

BATCH_NORM = (
    "batch norm is on: scores of a sequence depend on the others in its pass and on their padding, and probes' passes "
    "have others, so predictions and undeclared loss terms are not to be trusted: freeze it, {layer}.eval()"
)
MAX_ENTRIES = 2**18  # of a buffer that is preserved: larger ones are masks, tables or quantized weights


def batch_norm_remark(model: nn.Module) -> str:
    """Return what a layer that averages over the rows of a pass means for the estimates; "" if the model has none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return BATCH_NORM.format(layer=f"model.{name}")
    return ""


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
