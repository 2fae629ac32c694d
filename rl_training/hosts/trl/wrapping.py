"""Wraps a method of an object for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def wrap(owner: object, name: str, method: Callable[..., Any], undo: ExitStack) -> None:
    """Make owner.<name>(...) call method(original, ...), until `undo` is closed."""
    before = vars(owner).get(name)  # set if someone else has wrapped it
    setattr(owner, name, functools.partial(method, getattr(owner, name)))
    if before is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)
