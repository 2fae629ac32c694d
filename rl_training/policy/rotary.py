"""Rotary tables that depend on the longest row of a forward pass and outlive it: dynamic NTK, longrope.

Transformers keeps them on the model until a longer row, or a short one, replaces them. A probe's forward pass must not
change the tables that training's next forward pass uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

DYNAMIC_TYPES = ("dynamic", "longrope")  # substrings of such tables' rope_type


def depends_on_longest_row(model: nn.Module) -> bool:
    """Return whether a row's scores may depend on the other rows of its batch."""
    return bool(_dynamic_modules(model))


@contextlib.contextmanager
def preserve_rotary_tables(model: nn.Module) -> Iterator[None]:
    """Restore the model's rotary tables when the context ends."""
    saved = [
        (module, dict(module._buffers), {name: buffer.clone() for name, buffer in _tensors(module._buffers).items()},
         {name: value for name, value in vars(module).items() if isinstance(value, int | float | Tensor)})
        for module in _dynamic_modules(model)
    ]  # fmt: skip
    try:
        yield
    finally:
        for module, buffers, values, numbers in saved:
            module._buffers.update(buffers)
            for name, value in values.items():
                buffers[name].copy_(value)  # some tables are overwritten in place
            vars(module).update(numbers)


def _tensors(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in buffers.items() if buffer is not None}


def _dynamic_modules(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if any(kind in str(getattr(module, "rope_type", "")) for kind in DYNAMIC_TYPES)
    ]
